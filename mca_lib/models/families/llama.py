"""Llama 1 to 3.x, and the many models that save themselves as `llama` (SmolLM2, TinyLlama, Yi, ...)."""

from mca_lib.models.families.base import Family, Field
from mca_lib.models.families.dense import (
    DENSE_FIELDS,
    DENSE_NEUTRAL,
    DENSE_WEIGHTS,
    MLP_BIAS,
    OUTPUT_BIAS,
    QKV_BIAS,
    head_size,
)

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=(
        *DENSE_FIELDS,
        Field("max_position_embeddings", "max_position_embeddings", 2048),
        Field("head_dim", "kv_channels", head_size),
        Field("mlp_bias", "mlp_bias", False),
        Field("attention_bias", ("qkv_bias", "attention_output_bias"), False),
    ),
    weights=(*DENSE_WEIGHTS, *QKV_BIAS, *OUTPUT_BIAS, *MLP_BIAS),
    neutral=tuple(rule for rule in DENSE_NEUTRAL if rule.hf != "mlp_bias"),
)
