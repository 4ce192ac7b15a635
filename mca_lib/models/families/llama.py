"""Llama 1 to 3.x, and the many models that save themselves as `llama` (SmolLM2, TinyLlama, Yi, ...)."""

from mca_lib.errors import ModelError
from mca_lib.models.families.base import Family, Field, HfConfig
from mca_lib.models.families.dense import (
    DENSE_FIELDS,
    DENSE_NEUTRAL,
    DENSE_WEIGHTS,
    MLP_BIAS,
    OUTPUT_BIAS,
    QKV_BIAS,
    head_size,
)


def whole_head_size(hf: HfConfig) -> int:
    """transformers' head size where the config does not give one; heads that do not divide are an error there."""
    if hf["hidden_size"] % hf["num_attention_heads"]:
        raise ModelError(
            f"config.json: hidden_size={hf['hidden_size']} does not divide by num_attention_heads="
            f"{hf['num_attention_heads']}, and head_dim is missing"
        )
    return head_size(hf)


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=(
        *DENSE_FIELDS,
        Field("max_position_embeddings", "max_position_embeddings", 2048),
        Field("head_dim", "kv_channels", whole_head_size),
        Field("mlp_bias", "mlp_bias", False),
        Field("attention_bias", ("qkv_bias", "attention_output_bias"), False),
    ),
    weights=(*DENSE_WEIGHTS, *QKV_BIAS, *OUTPUT_BIAS, *MLP_BIAS),
    neutral=tuple(rule for rule in DENSE_NEUTRAL if rule.hf != "mlp_bias"),
)
