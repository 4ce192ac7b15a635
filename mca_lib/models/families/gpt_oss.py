"""GPT-OSS: attention sinks, a window in every other layer, clamped SwiGLU experts with biases, stored stacked."""

from mca_lib.converter.mappings import Column, Replicated
from mca_lib.converter.transposed import InterleavedMLP, TransposedRow
from mca_lib.models.config import YarnRope
from mca_lib.models.families.base import Family, Field, HfConfig, Neutral
from mca_lib.models.families.dense import (
    ATTENTION,
    DENSE_FIELDS,
    EMBEDDINGS,
    OUTPUT_BIAS,
    QKV_BIAS,
    head_size,
    key_value_heads,
    replaced,
)
from mca_lib.models.families.moe import MOE_FIELDS, MOE_NEUTRAL
from mca_lib.models.families.window import PeriodicWindow

_MCA, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."
_EXPERT, _HF_EXPERTS = _MCA + "mlp.experts.experts.{expert}.", _HF + "mlp.experts."
_FFN, _HIDDEN = "moe.ffn_hidden_size", "hidden_size"

# fmt: off
_SINKS = (
    Column(        _MCA + "self_attention.core_attention.softmax_offset", _HF + "self_attn.sinks",
                   ("num_attention_heads",)),
)

_EXPERTS = (
    Replicated(    _MCA + "pre_mlp_layernorm.weight",   _HF + "post_attention_layernorm.weight", (_HIDDEN,)),
    Replicated(    _MCA + "mlp.router.weight",          _HF + "mlp.router.weight", ("moe.num_experts", _HIDDEN)),
    Replicated(    _MCA + "mlp.router.bias",            _HF + "mlp.router.bias", ("moe.num_experts",)),
    InterleavedMLP(_EXPERT + "linear_fc1.weight",       _HF_EXPERTS + "gate_up_proj[{expert}]", (_FFN, _HIDDEN)),
    InterleavedMLP(_EXPERT + "linear_fc1.bias",         _HF_EXPERTS + "gate_up_proj_bias[{expert}]", (_FFN,)),
    TransposedRow( _EXPERT + "linear_fc2.weight",       _HF_EXPERTS + "down_proj[{expert}]", (_HIDDEN, _FFN)),
    Replicated(    _EXPERT + "linear_fc2.bias",         _HF_EXPERTS + "down_proj_bias[{expert}]", (_HIDDEN,)),
)
# fmt: on


def _every_layer(hf: HfConfig) -> tuple[int, ...]:
    return tuple(range(hf["num_hidden_layers"]))


FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    fields=(
        *replaced(DENSE_FIELDS, Field("rms_norm_eps", "norm_epsilon", 1e-5), key_value_heads(8)),
        *MOE_FIELDS,
        Field("max_position_embeddings", "max_position_embeddings", 131072),
        Field("head_dim", "kv_channels", 64, null=head_size),
        Field("num_local_experts", "moe.num_experts", aliases=("num_experts",)),
        Field("intermediate_size", "moe.ffn_hidden_size"),
        Field("swiglu_limit", "activation_clamp", 7.0),
    ),
    weights=(*EMBEDDINGS, *ATTENTION, *QKV_BIAS, *OUTPUT_BIAS, *_SINKS, *_EXPERTS),
    neutral=(
        *MOE_NEUTRAL,
        # Megatron has one switch for these biases and for those of the experts, which are not optional.
        Neutral("attention_bias", (True,)),
        Neutral("swiglu_alpha", (1.702,)),
    ),
    fixed={
        "qkv_bias": True,
        "attention_output_bias": True,
        "attention_sinks": True,
        "activation": "quick_geglu",
        "glu_linear_offset": 1.0,
        "moe.bias": True,
    },
    derived={"moe.layers": _every_layer},
    rope_base=150000.0,
    default_rope=YarnRope(factor=32.0, original_max_position_embeddings=4096, truncate=False),
    window=PeriodicWindow(default=128, period=2),
)
