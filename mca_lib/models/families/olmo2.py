"""OLMo 2: norms on the output of attention and MLP in place of their input, one over all heads of queries and keys."""

from mca_lib.converter.mappings import Column
from mca_lib.models.families.base import Family, Field
from mca_lib.models.families.dense import (
    ATTENTION_LINEAR,
    DENSE_FIELDS,
    DENSE_NEUTRAL,
    EMBEDDINGS,
    MLP_LINEAR,
    OUTPUT_BIAS,
    POST_NORMS,
    QKV_BIAS,
    head_size,
    replaced,
)

_MCA, _HF = "decoder.layers.{layer}.self_attention.", "model.layers.{layer}.self_attn."

HEADS_NORM = (
    Column(_MCA + "query_norm.weight", _HF + "q_norm.weight", ("query_size",)),
    Column(_MCA + "key_norm.weight", _HF + "k_norm.weight", ("kv_size",)),
)

FAMILY = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    fields=replaced(
        DENSE_FIELDS,
        Field("rms_norm_eps", "norm_epsilon", 1e-5),
        Field("max_position_embeddings", "max_position_embeddings", 2048),
        Field("head_dim", "kv_channels", head_size),
        Field("attention_bias", ("qkv_bias", "attention_output_bias"), False),
    ),
    weights=(*EMBEDDINGS, *ATTENTION_LINEAR, *QKV_BIAS, *OUTPUT_BIAS, *HEADS_NORM, *MLP_LINEAR, *POST_NORMS),
    neutral=DENSE_NEUTRAL,
    fixed={"pre_norms": False, "post_norms": True, "qk_norm_over_heads": True},
)
