"""Qwen2 and Qwen2.5, dense: biases on query, key and value, none on the output projection."""

from mca_lib.models.families.base import Family, Field
from mca_lib.models.families.dense import DENSE_FIELDS, DENSE_NEUTRAL, DENSE_WEIGHTS, QKV_BIAS, head_size

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=(
        *DENSE_FIELDS,
        Field("max_position_embeddings", "max_position_embeddings", 32768),
        Field("head_dim", "kv_channels", head_size),
    ),
    weights=(*DENSE_WEIGHTS, *QKV_BIAS),
    neutral=DENSE_NEUTRAL,
    fixed={"qkv_bias": True},
)
