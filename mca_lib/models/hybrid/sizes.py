"""Sizes of the Mamba-2 layers that a transformer gets: what is given, and the rest derived. No torch.

The inner size (heads x channels of a head) is twice the hidden size and a head has 64 channels, as in Mamba-2's models
(https://arxiv.org/abs/2405.21060). Where one of heads and channels is given, the other follows from the inner size.
"""

from collections.abc import Mapping

from mca_lib.errors import ConfigError, ModelError
from mca_lib.models.config_parts import HybridLayers, Mamba2
from mca_lib.models.hybrid.pattern import MAMBA

EXPANSION = 2
HEAD_DIM = 64


def mamba_sizes(hidden_size: int, given: Mapping[str, int | None], prefix: str = "mamba_") -> Mamba2:
    """The sizes for a model of `hidden_size` channels.

    Args:
        given: field of `Mamba2` → its size; None or absent: derived.
        prefix: what the user's names have before those fields, as `mamba_` of `mamba_num_heads`.

    Raises ConfigError naming the field that does not fit.
    """
    sizes = {name: size for name, size in given.items() if size is not None}
    if not ("num_heads" in sizes and "head_dim" in sizes):
        inner, known = EXPANSION * hidden_size, "num_heads" if "num_heads" in sizes else "head_dim"
        size = sizes.setdefault(known, HEAD_DIM)
        if type(size) is not int or size < 1 or inner % size:
            raise ConfigError(
                f"{prefix}{known}: {size!r} does not divide the inner size of the Mamba layers, {EXPANSION} x the "
                f"model's {hidden_size} channels = {inner}; set {prefix}num_heads and {prefix}head_dim"
            )
        sizes["head_dim" if known == "num_heads" else "num_heads"] = inner // size
    try:
        return Mamba2(**sizes)
    except ModelError as error:
        raise ConfigError(f"{prefix}*: {str(error).removeprefix('model config: ')}") from error


def hybrid_layers(
    pattern: str, hidden_size: int, given: Mapping[str, int | None], prefix: str = "mamba_"
) -> HybridLayers:
    """The layers of a pattern without `|`, with the sizes of its Mamba layers if it has any; see `mamba_sizes`."""
    return HybridLayers(pattern, mamba_sizes(hidden_size, given, prefix) if MAMBA in pattern else None)
