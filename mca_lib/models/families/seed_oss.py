"""Seed-OSS: the Llama layer with biases on query, key and value, and dropout on what a layer adds to the residual."""

from mca_lib.models.families.base import Family, Field
from mca_lib.models.families.dense import (
    DENSE_FIELDS,
    DENSE_NEUTRAL,
    DENSE_WEIGHTS,
    MLP_BIAS,
    OUTPUT_BIAS,
    QKV_BIAS,
    head_size,
    key_value_heads,
    replaced,
)

FAMILY = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    fields=replaced(
        DENSE_FIELDS,
        Field("max_position_embeddings", "max_position_embeddings", 524288),
        key_value_heads(8),
        Field("head_dim", "kv_channels", 128, null=head_size),
        Field("attention_bias", "qkv_bias", True),
        Field("attention_out_bias", "attention_output_bias", False),
        Field("mlp_bias", "mlp_bias", False),
        Field("attention_dropout", "attention_dropout", 0.1),
        Field("residual_dropout", "residual_dropout", 0.1),
    ),
    weights=(*DENSE_WEIGHTS, *QKV_BIAS, *OUTPUT_BIAS, *MLP_BIAS),
    neutral=tuple(rule for rule in DENSE_NEUTRAL if rule.hf != "mlp_bias"),
)
