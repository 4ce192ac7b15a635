"""Qwen2 and Qwen2.5, dense: biases on query, key and value, none on the output projection."""

from mca_lib.models.families.base import Family, Field
from mca_lib.models.families.dense import (
    DENSE_FIELDS,
    DENSE_NEUTRAL,
    DENSE_WEIGHTS,
    QKV_BIAS,
    head_size,
    key_value_heads,
    replaced,
)
from mca_lib.models.families.window import SwitchedWindow

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=replaced(
        DENSE_FIELDS,
        Field("max_position_embeddings", "max_position_embeddings", 32768),
        key_value_heads(32),
        Field("head_dim", "kv_channels", head_size),
    ),
    weights=(*DENSE_WEIGHTS, *QKV_BIAS),
    neutral=DENSE_NEUTRAL,
    window=SwitchedWindow(),
    fixed={"qkv_bias": True},
)
