"""Gemma 3, the language model: norms before and after attention and MLP, a window and a second rope in most layers."""

from mca_lib.converter.mappings import Replicated
from mca_lib.models.families.base import Family, Field, Neutral
from mca_lib.models.families.dense import (
    ATTENTION,
    DENSE_FIELDS,
    DENSE_NEUTRAL,
    EMBEDDINGS,
    MLP_LINEAR,
    OUTPUT_BIAS,
    POST_NORMS,
    QK_NORM,
    QKV_BIAS,
    key_value_heads,
    replaced,
)
from mca_lib.models.families.window import PeriodicWindow

_MLP_NORM = Replicated(
    "decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight",
    "model.layers.{layer}.pre_feedforward_layernorm.weight",
    ("hidden_size",),
)

FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fields=replaced(
        DENSE_FIELDS,
        Field("tie_word_embeddings", "tie_word_embeddings", True),
        Field("max_position_embeddings", "max_position_embeddings", 131072),
        Field("num_attention_heads", "num_attention_heads", 8),
        key_value_heads(4),
        Field("head_dim", "kv_channels", 256),
        Field("query_pre_attn_scalar", "query_pre_attn_scalar", 256),
        Field("attention_bias", ("qkv_bias", "attention_output_bias"), False),
    ),
    weights=(
        *EMBEDDINGS,
        *ATTENTION,
        *QK_NORM,
        *QKV_BIAS,
        *OUTPUT_BIAS,
        _MLP_NORM,
        *MLP_LINEAR,
        *POST_NORMS,
    ),
    neutral=(
        *(rule for rule in DENSE_NEUTRAL if rule.hf not in ("hidden_act", "query_pre_attn_scalar")),
        Neutral("hidden_activation", ("gelu_pytorch_tanh",)),
        Neutral("use_bidirectional_attention", (False,)),
    ),
    fixed={"zero_centered_norms": True, "post_norms": True, "qk_layernorm": True, "activation": "geglu"},
    derived={"embedding_multiplier": lambda hf: hf["hidden_size"] ** 0.5},
    rope_base=1e6,
    sliding_rope_base=1e4,
    window=PeriodicWindow(default=4096, period=6, period_field="sliding_window_pattern"),
)
