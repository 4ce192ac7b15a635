"""Mistral: the Llama layer with a head size of its own and a sliding window."""

from mca_lib.models.families.base import Family, Field, Neutral
from mca_lib.models.families.dense import (
    DENSE_FIELDS,
    DENSE_NEUTRAL,
    DENSE_WEIGHTS,
    head_size,
    key_value_heads,
    replaced,
)
from mca_lib.models.families.window import OneWindow

FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=replaced(
        DENSE_FIELDS,
        Field("max_position_embeddings", "max_position_embeddings", 131072),
        Field("head_dim", "kv_channels", head_size),
        key_value_heads(8),
    ),
    weights=DENSE_WEIGHTS,
    neutral=(*DENSE_NEUTRAL, Neutral("attention_bias", (False,))),
    window=OneWindow(default=4096),
)
