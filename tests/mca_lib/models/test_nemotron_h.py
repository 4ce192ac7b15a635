"""Nemotron-H: config and weights of transformers, there and back, and its logits in Megatron."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mca_lib.converter.export import export_hf
from mca_lib.converter.hf_source import HfSource
from mca_lib.converter.stream import convert_hf
from mca_lib.errors import ConfigError, ModelError
from mca_lib.models.config import HybridLayers
from mca_lib.models.families.nemotron_h import FAMILY
from mca_lib.models.registry import config_from_hf
from tests.mca_lib.models import nemotron_ranks

LIMIT = 1e-4
"""Of logits of about 5 in fp32."""

HF: dict[str, Any] = {
    "model_type": "nemotron_h",
    **nemotron_ranks.SIZES,
}


@pytest.mark.parametrize("changes", [{}, {"layers_block_type": ["linear_attention", "mlp", "full_attention"]}])
def test_logits_are_those_of_transformers_and_the_weights_go_back(
    ranks: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """With every kind of layer, an epsilon that shows, groups, a kernel of 3; and without experts."""
    ranks(1, nemotron_ranks.save_nemotron, tmp_path / "hf", changes)
    ((difference, largest),) = ranks(1, nemotron_ranks.difference, tmp_path / "hf")
    assert difference <= LIMIT
    assert largest > 1
    convert_hf(tmp_path / "hf", tmp_path / "mca")
    export_hf(tmp_path / "mca", tmp_path / "export")
    assert _tensors(tmp_path / "export") == _tensors(tmp_path / "hf")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "export")]
    assert configs[0] == configs[1]


def _tensors(directory: Path) -> dict[str, tuple[Any, bytes]]:
    with HfSource(directory) as source:
        return {n: (info, source.slice(n)[:].numpy().tobytes()) for n, info in source.tensors.items()}


@pytest.mark.parametrize(
    "spelled",
    [
        {"layers_block_type": ["mamba", "mlp", "attention", "moe"]},
        {"layers_block_type": None, "layer_types": ["linear_attention", "mlp", "full_attention", "moe"]},
        {"layers_block_type": None, "hybrid_override_pattern": "M-*E"},
    ],
)
def test_every_spelling_of_the_layers_is_read(spelled: dict[str, Any]) -> None:
    config = config_from_hf({**HF, **spelled})
    assert config.hybrid.pattern == "M-*E"
    assert config.moe.layers == (3,)
    assert (config.activation, config.rotary, config.norm_epsilon, config.hybrid.mamba.norm_epsilon) == (
        *("relu2", False),
        *(1e-3, 1e-3),
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers_block_type": None}, "layers_block_type is missing"),
        ({"layers_block_type": ["conv"]}, "layers_block_type: 'conv' is none of"),
        ({"hybrid_override_pattern": "M*"}, "layers_block_type and hybrid_override_pattern differ"),
        ({"num_hidden_layers": 3}, "num_hidden_layers=3, and layers_block_type has 6"),
    ],
)
def test_layers_that_cannot_be_read_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        config_from_hf({**HF, **changes})


def test_a_hybrid_does_not_become_one() -> None:
    with pytest.raises(ConfigError, match="the model is a hybrid already, of pattern 'M-\\*EME'"):
        config_from_hf(HF).with_hybrid(HybridLayers("*-"))


def test_a_pattern_that_changes_is_written_as_names() -> None:
    config = config_from_hf(
        {**HF, "layers_block_type": None, "hybrid_override_pattern": "M-*E", "num_hidden_layers": 4}
    )
    hf = FAMILY.config_to_hf(config)
    assert hf["hybrid_override_pattern"] == "M-*E"
    shorter = replace(
        config, num_layers=3, hybrid=replace(config.hybrid, pattern="M*E"), moe=replace(config.moe, layers=(2,))
    )
    hf = FAMILY.config_to_hf(shorter)
    assert hf["layers_block_type"] == ["linear_attention", "full_attention", "moe"]
    assert "hybrid_override_pattern" not in hf
    assert config_from_hf(hf).hybrid.pattern == "M*E"
