"""Tiny hybrids with random weights, by name; no torch at import."""

from typing import Any

from mca_lib.models.config import HybridLayers, Mamba2, McaModelConfig
from mca_lib.models.registry import config_from_hf
from mca_lib.verification.tiny import tiny_config

MAMBA = Mamba2(num_heads=8, head_dim=8, state_size=16, num_groups=2, chunk_size=8)
HYBRIDS: dict[str, tuple[str, str]] = {
    "dense": ("qwen3", "M*-*-M*-*-"),
    "experts": ("mixtral", "M*E*EM*E*E"),
    "without Mamba": ("llama", "*-*-*-*-"),
}
"""Name → (model type of its transformer, pattern)."""


def hybrid_config(name: str, **mamba: Any) -> McaModelConfig:
    """`mamba`: sizes that differ from `MAMBA`."""
    model_type, pattern = HYBRIDS[name]
    transformer = config_from_hf(tiny_config(model_type))
    return transformer.with_hybrid(HybridLayers(pattern, Mamba2(**vars(MAMBA) | mamba) if "M" in pattern else None))
