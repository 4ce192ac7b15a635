"""What the Qwen families with gated delta nets have in common: fields, attention with a gate, and weights.

Layers take turns: some gated delta nets, then one with softmax attention. All norms are zero-centred but that within a
gated delta net.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mca_lib.converter.mapping import Mapping
from mca_lib.converter.mappings import Column, GatedQKV, Packed, Replicated, Row
from mca_lib.errors import ModelError
from mca_lib.models.families.base import Field, HfConfig, Neutral
from mca_lib.models.families.dense import ATTENTION, OUTPUT_BIAS, QK_NORM, QKV_BIAS
from mca_lib.models.families.window import NoWindow

_NET = "gated_delta_net."
_TYPES = ("linear_attention", "full_attention")

FIELDS = (
    Field("max_position_embeddings", "max_position_embeddings", 32768),
    Field("head_dim", "kv_channels", 256),
    Field("attention_bias", ("qkv_bias", "attention_output_bias"), False),
    Field("linear_num_key_heads", _NET + "num_key_heads", 16),
    Field("linear_num_value_heads", _NET + "num_value_heads", 32),
    Field("linear_key_head_dim", _NET + "key_head_dim", 128),
    Field("linear_value_head_dim", _NET + "value_head_dim", 128),
    Field("linear_conv_kernel_dim", _NET + "conv_kernel", 4),
)

MTP_FIELD = Field("mtp_num_hidden_layers", "mtp_num_layers", 0, aliases=("num_mtp_layers",))

NEUTRAL = (
    # Switches of the publisher's code, which transformers does not read: there they are always on.
    Neutral("attn_output_gate", (True,), null_is_absent=False),
    Neutral("output_gate_type", ("swish", "silu")),
    # Names of the weights leave room for one.
    Neutral("mtp_num_hidden_layers", (0, 1)),
    Neutral("mtp_use_dedicated_embeddings", (False,)),
)

FIXED = {"qk_layernorm": True, "zero_centered_norms": True, "attention_output_gate": True}

ROTARY_SHARE = 0.25


def linear_layers(hf: HfConfig) -> tuple[int, ...]:
    """Layers with a gated delta net: as `layer_types` says, else all but every `full_attention_interval`-th."""
    layers, types = hf["num_hidden_layers"], hf.get("layer_types")
    if types is None:
        interval = hf.get("full_attention_interval") or 4
        return tuple(i for i in range(layers) if (i + 1) % interval)
    if len(types) != layers:
        raise ModelError(f"config.json: layer_types names {len(types)} layers, num_hidden_layers={layers}")
    if odd := [kind for kind in types if kind not in _TYPES]:
        raise ModelError(f"config.json: layer_types: {odd[0]!r:.80} is none of {', '.join(_TYPES)}")
    return tuple(i for i, kind in enumerate(types) if kind == "linear_attention")


DERIVED = {_NET + "layers": linear_layers}


@dataclass(frozen=True)
class NoWindowBesideLinear(NoWindow):
    """No layer has a window; `layer_types` is about something else (`linear_layers`)."""

    def read(self, hf: HfConfig) -> tuple[int | None, tuple[int, ...]]:
        return super().read({name: value for name, value in hf.items() if name != "layer_types"})


_LAYER, _HF_LAYER, _MTP = "decoder.layers.{layer}.", "model.layers.{layer}.", "mtp.layers.{mtp}."
_MCA, _HF = _LAYER + "self_attention.", _HF_LAYER + "linear_attn."
_KEYS, _VALUES, _HEADS = _NET + "key_size", _NET + "value_size", _NET + "num_value_heads"
_CONV = (("query", _KEYS), ("key", _KEYS), ("value", _VALUES))
_LAYERS = "linear_attention_layers"


def gated_attention(rows: Sequence[Mapping]) -> tuple[Mapping, ...]:
    """Rows of softmax attention, in some layers, whose query projection makes the gate too."""
    found = []
    for row in rows:
        if ".linear_qkv." in row.mca and len(row.hf) == 3:
            row = GatedQKV(row.mca, row.hf, row.columns, when=row.when)
        found.append(replace(row, layers="attention_layers"))
    return tuple(found)


GATED_ATTENTION = gated_attention((*ATTENTION, *QK_NORM, *QKV_BIAS, *OUTPUT_BIAS))


# fmt: off
def gated_delta_net(in_proj: Sequence[str], hf_parts: tuple[int, ...], groups: int | str = 1) -> tuple[Mapping, ...]:
    """Rows of the gated delta nets.

    Args:
        in_proj: names of the input projections within the module, which have query, key, value, gate (z), rate of
            writing (beta) and decay (alpha) of a token between them, in this order.
        hf_parts: how many of them each has.
        groups: they take turns in so many groups of heads.
    """
    return (
        Replicated(_MCA + "in_proj.layer_norm_weight", "model.layers.{layer}.input_layernorm.weight",
                   ("hidden_size",), layers=_LAYERS),
        Packed(    _MCA + "in_proj.weight",  tuple(f"{_HF}{name}.weight" for name in in_proj),
                   (*_CONV, ("z", _VALUES), ("beta", _HEADS), ("alpha", _HEADS)), ("hidden_size",),
                   hf_parts=hf_parts, groups=groups, layers=_LAYERS),
        Packed(    _MCA + "conv1d.weight",   _HF + "conv1d.weight", _CONV, (1, _NET + "conv_kernel"), layers=_LAYERS),
        Column(    _MCA + "A_log",           _HF + "A_log", (_HEADS,), layers=_LAYERS),
        Column(    _MCA + "dt_bias",         _HF + "dt_bias", (_HEADS,), layers=_LAYERS),
        Replicated(_MCA + "out_norm.weight", _HF + "norm.weight", (_NET + "value_head_dim",), layers=_LAYERS),
        Row(       _MCA + "out_proj.weight", _HF + "out_proj.weight", ("hidden_size", _VALUES), layers=_LAYERS),
    )


_MTP_OWN = (
    Replicated(_MTP + "enorm.weight",           "mtp.pre_fc_norm_embedding.weight", ("hidden_size",)),
    Replicated(_MTP + "hnorm.weight",           "mtp.pre_fc_norm_hidden.weight", ("hidden_size",)),
    Column(    _MTP + "eh_proj.weight",         "mtp.fc.weight", ("hidden_size", "twice_hidden_size")),
    Replicated(_MTP + "final_layernorm.weight", "mtp.norm.weight", ("hidden_size",)),
)
# fmt: on


def multi_token_prediction(mlp: Sequence[Mapping]) -> tuple[Mapping, ...]:
    """Rows of the multi-token prediction layer, whose own layer has softmax attention and this MLP."""
    return (*_MTP_OWN, *(_in_mtp(row) for row in (*GATED_ATTENTION, *mlp)))


def _in_mtp(row: Mapping) -> Mapping:
    mca = row.mca.replace(_LAYER, _MTP + "transformer_layer.")
    return replace(row, mca=mca, hf=tuple(name.replace(_HF_LAYER, _MTP) for name in row.hf), layers=None)
