"""Qwen3 with experts in place of some MLPs."""

from mca_lib.models.families.base import Family, Field
from mca_lib.models.families.dense import (
    DENSE_FIELDS,
    DENSE_WEIGHTS,
    OUTPUT_BIAS,
    QK_NORM,
    QKV_BIAS,
    head_size,
    key_value_heads,
    replaced,
)
from mca_lib.models.families.moe import EXPERT_WEIGHTS, MOE_NEUTRAL, QWEN_MOE_FIELDS, sparse_layers
from mca_lib.models.families.window import SwitchedWindow

FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=(
        *replaced(DENSE_FIELDS, key_value_heads(4)),
        *QWEN_MOE_FIELDS,
        Field("max_position_embeddings", "max_position_embeddings", 32768),
        Field("head_dim", "kv_channels", head_size),
        Field("attention_bias", ("qkv_bias", "attention_output_bias"), False),
    ),
    weights=(*DENSE_WEIGHTS, *QK_NORM, *QKV_BIAS, *OUTPUT_BIAS, *EXPERT_WEIGHTS),
    neutral=MOE_NEUTRAL,
    fixed={"qk_layernorm": True},
    derived={"moe.layers": sparse_layers},
    window=SwitchedWindow(by_layer=False),
)
