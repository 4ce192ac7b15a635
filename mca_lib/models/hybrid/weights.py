"""Weight table of a hybrid: the rows of the transformer that it started from, and those of its Mamba-2 layers.

A row stands for one parameter of Megatron. Mamba layers are named alike by Hugging Face's models; those that a
transformer got have names of `families.mcaflow_hybrid` in an export, and none in the source. No torch.
"""

from collections.abc import Iterable
from dataclasses import replace

from mca_lib.converter.mapping import Mapping
from mca_lib.converter.mappings import Column, Packed, Replicated, Row
from mca_lib.models.hybrid.names import HYBRID_NORM, TRANSFORMER_NORM

_MCA = "decoder.layers.{layer}.mixer."
_INNER, _GROUP, _HEADS = "hybrid.mamba.inner_size", "hybrid.mamba.group_size", "hybrid.mamba.num_heads"
_CONV = (("x", _INNER), ("B", _GROUP), ("C", _GROUP))
"""What the convolution runs over."""
_HIDDEN, _LAYERS = "hidden_size", "mamba_layers"

KEPT_IN_FP32 = (".mixer.A_log", ".mixer.D", ".mixer.dt_bias")
"""Ends of the names of weights that a checkpoint keeps in fp32: few, and of a few bits' effect over many steps."""


# fmt: off
def mamba_weights(norm: str, mixer: str) -> tuple[Mapping, ...]:
    """Rows of the Mamba-2 layers; `norm` and `mixer` are what the Hugging Face names of a layer's parts begin with."""
    return (
        Replicated(_MCA + "in_proj.layer_norm_weight", norm + "weight", (_HIDDEN,), layers=_LAYERS),
        # z gates the output; x, B, C and dt are the input of the recurrence.
        Packed(    _MCA + "in_proj.weight",  mixer + "in_proj.weight", (("z", _INNER), *_CONV, ("dt", _HEADS)),
                   (_HIDDEN,), layers=_LAYERS),
        Packed(    _MCA + "conv1d.weight",   mixer + "conv1d.weight", _CONV, (1, "hybrid.mamba.conv_kernel"),
                   layers=_LAYERS),
        Packed(    _MCA + "conv1d.bias",     mixer + "conv1d.bias", _CONV, (), layers=_LAYERS),
        Column(    _MCA + "A_log",           mixer + "A_log", (_HEADS,), layers=_LAYERS),
        Column(    _MCA + "D",               mixer + "D", (_HEADS,), layers=_LAYERS),
        Column(    _MCA + "dt_bias",         mixer + "dt_bias", (_HEADS,), layers=_LAYERS),
        Column(    _MCA + "norm.weight",     mixer + "norm.weight", (_INNER,), layers=_LAYERS),
        Row(       _MCA + "out_proj.weight", mixer + "out_proj.weight", (_HIDDEN, _INNER), layers=_LAYERS),
    )
# fmt: on


MAMBA_WEIGHTS = mamba_weights("mamba.{layer}.input_norm.", "mamba.{layer}.")


def hybrid_rows(rows: Iterable[Mapping]) -> list[Mapping]:
    """The rows of a transformer's table for a hybrid, whose layers have but one part each, and the Mamba rows."""
    return [*map(_renumbered, rows), *MAMBA_WEIGHTS]


def _renumbered(row: Mapping) -> Mapping:
    if row.mca.startswith(TRANSFORMER_NORM):
        return replace(row, mca=HYBRID_NORM + row.mca.removeprefix(TRANSFORMER_NORM))
    if "{layer}" not in row.mca:
        return row
    hf = tuple(name.replace("{layer}", "{source_layer}") for name in row.hf)
    return replace(row, hf=hf, layers=row.layers or "attention_layers")  # rows of MLPs say which layers have them
