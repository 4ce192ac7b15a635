"""Qwen3, dense: RMSNorm over each head of query and key, and a head size of its own."""

from mca_lib.models.families.base import Family, Field
from mca_lib.models.families.dense import (
    DENSE_FIELDS,
    DENSE_NEUTRAL,
    DENSE_WEIGHTS,
    OUTPUT_BIAS,
    QK_NORM,
    QKV_BIAS,
    key_value_heads,
    replaced,
)
from mca_lib.models.families.window import SwitchedWindow

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=replaced(
        DENSE_FIELDS,
        Field("max_position_embeddings", "max_position_embeddings", 32768),
        key_value_heads(32),
        Field("head_dim", "kv_channels", 128),
        Field("attention_bias", ("qkv_bias", "attention_output_bias"), False),
    ),
    weights=(*DENSE_WEIGHTS, *QK_NORM, *QKV_BIAS, *OUTPUT_BIAS),
    neutral=DENSE_NEUTRAL,
    window=SwitchedWindow(),
    fixed={"qk_layernorm": True},
)
