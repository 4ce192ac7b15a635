"""The vision towers of transformers, as tables: which tensors a tower of these sizes has. No torch.

    class                                      blocks                          merger
    Qwen2VisionTransformerPretrainedModel      LayerNorm, MLP                  of 2 x 2 patches
    Qwen2_5_VisionTransformerPretrainedModel   RMSNorm, gated MLP, windows     of 2 x 2 patches
    Qwen3VLVisionModel                         LayerNorm, MLP, positions       and one for each deepstack layer

A tower's names are those within `model.visual` of transformers; the names of a checkpoint have `vision_model` before
them. Every tensor-parallel rank holds the tower whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mca_lib.converter.mappings import Replicated
from mca_lib.errors import ModelError

PREFIX = "vision_model."
"""Of a tower's tensors in a checkpoint."""
HF_PREFIX = "model.visual."

Tensors = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a tower, read with transformers' defaults."""

    depth: int
    hidden: int
    """Of a patch in the blocks."""
    inner: int
    """Of the blocks' MLPs."""
    output: int
    """Of a feature, which is the language model's hidden size."""
    heads: int
    patch: int
    """Pixels along a side."""
    temporal: int
    """Frames of a patch."""
    merge: int
    """Patches along a side that become one feature."""
    channels: int
    positions: int = 0
    """Of the learned grid."""
    deepstack: int = 0

    @property
    def merged(self) -> int:
        return self.hidden * self.merge**2

    @property
    def patch_values(self) -> int:
        """Numbers that an image processor gives for a patch."""
        return self.channels * self.temporal * self.patch**2


@dataclass(frozen=True)
class Tower:
    """A kind of tower."""

    model_type: str
    """Of its config in transformers."""
    model_class: str
    sizes: dict[str, tuple[str, Any]]
    """Field of `Sizes` → (field of the vision_config, transformers' default)."""
    tensors: Callable[[Sizes], Tensors]

    def read(self, config: dict[str, Any]) -> Sizes:
        """Raises ModelError naming the field of the vision_config that is no size, or no list of layers."""
        values = {}
        for name, (hf, default) in self.sizes.items():
            value = config.get(hf, default)
            if name == "deepstack":
                if not isinstance(value, list | tuple):
                    raise ModelError(f"config.json: vision_config.{hf}={value!r:.80} must be a list of layers")
                value = len(value)
            elif type(value) is not int or value < 1:
                raise ModelError(f"config.json: vision_config.{hf}={value!r:.80} must be a positive integer")
            values[name] = value
        if self.model_type == "qwen2_vl_vision":
            values["inner"] *= values["hidden"]
        sizes = Sizes(**values)
        if sizes.hidden % sizes.heads:
            raise ModelError(f"config.json: vision_config: {sizes.heads} heads do not divide {sizes.hidden} channels")
        return sizes

    def rows(self, config: dict[str, Any]) -> list[Replicated]:
        """Weight table of a tower of this vision_config."""
        return [Replicated(PREFIX + name, HF_PREFIX + name, dims) for name, dims in self.tensors(self.read(config))]


def _both(name: str, *dims: int) -> Tensors:
    """Weight and bias of a layer."""
    return [(f"{name}.weight", dims), (f"{name}.bias", dims[:1])]


def _patches(s: Sizes) -> Tensors:
    return [("patch_embed.proj.weight", (s.hidden, s.channels, s.temporal, s.patch, s.patch))]


def _attention(block: str, s: Sizes) -> Tensors:
    return [*_both(f"{block}.attn.qkv", 3 * s.hidden, s.hidden), *_both(f"{block}.attn.proj", s.hidden, s.hidden)]


def _qwen2(s: Sizes) -> Tensors:
    found = _patches(s)
    for block in (f"blocks.{i}" for i in range(s.depth)):
        found += [*_both(f"{block}.norm1", s.hidden), *_both(f"{block}.norm2", s.hidden), *_attention(block, s)]
        found += [*_both(f"{block}.mlp.fc1", s.inner, s.hidden), *_both(f"{block}.mlp.fc2", s.hidden, s.inner)]
    return [*found, *_both("merger.ln_q", s.hidden), *_merger(s)]


def _qwen2_5(s: Sizes) -> Tensors:
    found = _patches(s)
    for block in (f"blocks.{i}" for i in range(s.depth)):
        found += [(f"{block}.norm1.weight", (s.hidden,)), (f"{block}.norm2.weight", (s.hidden,))]
        found += _attention(block, s)
        for half in ("gate_proj", "up_proj"):
            found += _both(f"{block}.mlp.{half}", s.inner, s.hidden)
        found += _both(f"{block}.mlp.down_proj", s.hidden, s.inner)
    return [*found, ("merger.ln_q.weight", (s.hidden,)), *_merger(s)]


def _merger(s: Sizes) -> Tensors:
    return [*_both("merger.mlp.0", s.merged, s.merged), *_both("merger.mlp.2", s.output, s.merged)]


def _qwen3(s: Sizes) -> Tensors:
    found = [*_patches(s), ("patch_embed.proj.bias", (s.hidden,)), ("pos_embed.weight", (s.positions, s.hidden))]
    for block in (f"blocks.{i}" for i in range(s.depth)):
        found += [*_both(f"{block}.norm1", s.hidden), *_both(f"{block}.norm2", s.hidden), *_attention(block, s)]
        found += _both(f"{block}.mlp.linear_fc1", s.inner, s.hidden)
        found += _both(f"{block}.mlp.linear_fc2", s.hidden, s.inner)
    mergers = [("merger", s.hidden), *((f"deepstack_merger_list.{i}", s.merged) for i in range(s.deepstack))]
    for merger, normed in mergers:
        found += _both(f"{merger}.norm", normed)
        found += [
            *_both(f"{merger}.linear_fc1", s.merged, s.merged),
            *_both(f"{merger}.linear_fc2", s.output, s.merged),
        ]
    return found


_COMMON = {
    "depth": ("depth", 32),
    "heads": ("num_heads", 16),
    "patch": ("patch_size", 14),
    "temporal": ("temporal_patch_size", 2),
    "merge": ("spatial_merge_size", 2),
    "channels": ("in_channels", 3),
}

TOWERS = {
    "qwen2_vl": Tower(
        "qwen2_vl_vision",
        "Qwen2VisionTransformerPretrainedModel",
        {**_COMMON, "hidden": ("embed_dim", 1280), "inner": ("mlp_ratio", 4), "output": ("hidden_size", 3584)},
        _qwen2,
    ),
    "qwen2_5_vl": Tower(
        "qwen2_5_vl_vision",
        "Qwen2_5_VisionTransformerPretrainedModel",
        {
            **_COMMON,
            "hidden": ("hidden_size", 3584),
            "inner": ("intermediate_size", 3420),
            "output": ("out_hidden_size", 3584),
        },
        _qwen2_5,
    ),
    "qwen3_vl": Tower(
        "qwen3_vl_vision",
        "Qwen3VLVisionModel",
        {
            **_COMMON,
            "depth": ("depth", 27),
            "patch": ("patch_size", 16),
            "hidden": ("hidden_size", 1152),
            "inner": ("intermediate_size", 4304),
            "output": ("out_hidden_size", 3584),
            "positions": ("num_position_embeddings", 2304),
            "deepstack": ("deepstack_visual_indexes", (8, 16, 24)),
        },
        _qwen3,
    ),
}
"""Model type of the whole → its tower."""


def tower_sizes(model_type: str, config: dict[str, Any]) -> Sizes:
    """Sizes of a model's tower. Raises ModelError naming the field that is no size."""
    return TOWERS[model_type].read(config)
