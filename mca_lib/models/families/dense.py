"""What the dense families have in common: config fields, fields that must be neutral, and weights.

A family file takes these tables and adds what is its own. On the left of a weight table are the names of the
torch_dist checkpoint, which Transformer Engine's layer and the local one share.
"""

from mca_lib.converter.mappings import QKV, GatedMLP, Replicated, Row, Vocabulary
from mca_lib.models.families.base import Field, HfConfig, Neutral

DENSE_FIELDS = (
    Field("num_hidden_layers", "num_layers"),
    Field("hidden_size", "hidden_size"),
    Field("intermediate_size", "ffn_hidden_size"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("num_key_value_heads", "num_query_groups", lambda hf: hf["num_attention_heads"]),
    Field("vocab_size", "vocab_size"),
    Field("rms_norm_eps", "norm_epsilon", 1e-6),
    Field("tie_word_embeddings", "tie_word_embeddings", False),
    Field("attention_dropout", "attention_dropout", 0.0),
    Field("initializer_range", "initializer_range", 0.02),
)

DENSE_NEUTRAL = (
    Neutral("hidden_act", ("silu", "swish")),
    Neutral("mlp_bias", (False,)),
    Neutral("partial_rotary_factor", (1.0,)),
    Neutral("is_encoder_decoder", (False,)),
    # Code of the model's own decides its mathematics.
    Neutral("auto_map", ()),
    # Fields of variants that keep the model type of the family that they derive from.
    Neutral("attn_logit_softcapping", ()),
    Neutral("final_logit_softcapping", ()),
    Neutral("query_pre_attn_scalar", ()),
    Neutral("attention_multiplier", ()),
    Neutral("embedding_multiplier", (1.0,)),
    Neutral("residual_multiplier", (1.0,)),
    Neutral("logits_scaling", (1.0,)),
    Neutral("clip_qkv", ()),
    Neutral("no_rope_layers", ()),
    Neutral("num_experts", (0,)),
    Neutral("num_local_experts", (0,)),
    Neutral("add_cross_attention", (False,)),
    Neutral("is_causal", (True,), null_is_absent=False),
)

_MCA, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."
_QKV = (_HF + "self_attn.q_proj", _HF + "self_attn.k_proj", _HF + "self_attn.v_proj")
_GATE_UP = (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight")

# fmt: off
EMBEDDINGS = (
    Vocabulary("embedding.word_embeddings.weight",           "model.embed_tokens.weight"),
    Replicated("decoder.final_layernorm.weight",             "model.norm.weight", ("hidden_size",)),
    Vocabulary("output_layer.weight",                        "lm_head.weight", when="untied"),
)

ATTENTION_LINEAR = (
    QKV(       _MCA + "self_attention.linear_qkv.weight",    tuple(n + ".weight" for n in _QKV), ("hidden_size",)),
    Row(       _MCA + "self_attention.linear_proj.weight",   _HF + "self_attn.o_proj.weight",
                                                             ("hidden_size", "query_size")),
)

ATTENTION = (
    Replicated(_MCA + "self_attention.linear_qkv.layer_norm_weight",
                                                             _HF + "input_layernorm.weight", ("hidden_size",)),
    *ATTENTION_LINEAR,
)

MLP_LINEAR = (
    GatedMLP(  _MCA + "mlp.linear_fc1.weight",               _GATE_UP, layers="dense_layers"),
    Row(       _MCA + "mlp.linear_fc2.weight",               _HF + "mlp.down_proj.weight",
                                                             ("hidden_size", "ffn_hidden_size"), layers="dense_layers"),
)

MLP = (
    Replicated(_MCA + "mlp.linear_fc1.layer_norm_weight",    _HF + "post_attention_layernorm.weight", ("hidden_size",),
               layers="dense_layers"),
    *MLP_LINEAR,
)

POST_NORMS = (
    Replicated(_MCA + "post_attention_layernorm.weight",     _HF + "post_attention_layernorm.weight", ("hidden_size",)),
    Replicated(_MCA + "post_mlp_layernorm.weight",           _HF + "post_feedforward_layernorm.weight",
                                                             ("hidden_size",)),
)

DENSE_WEIGHTS = (*EMBEDDINGS, *ATTENTION, *MLP)
"""The Llama layer: norm, attention, norm, SwiGLU."""

QKV_BIAS = (
    QKV(       _MCA + "self_attention.linear_qkv.bias",      tuple(n + ".bias" for n in _QKV), (), when="qkv_bias"),
)

OUTPUT_BIAS = (
    Replicated(_MCA + "self_attention.linear_proj.bias",     _HF + "self_attn.o_proj.bias", ("hidden_size",),
               when="attention_output_bias"),
)

MLP_BIAS = (
    GatedMLP(  _MCA + "mlp.linear_fc1.bias",                 tuple(n.replace("weight", "bias") for n in _GATE_UP),
                                                             ("ffn_hidden_size",), when="mlp_bias",
               layers="dense_layers"),
    Replicated(_MCA + "mlp.linear_fc2.bias",                 _HF + "mlp.down_proj.bias", ("hidden_size",),
               when="mlp_bias", layers="dense_layers"),
)

QK_NORM = (
    Replicated(_MCA + "self_attention.q_layernorm.weight",   _HF + "self_attn.q_norm.weight", ("kv_channels",)),
    Replicated(_MCA + "self_attention.k_layernorm.weight",   _HF + "self_attn.k_norm.weight", ("kv_channels",)),
)
# fmt: on


def replaced(fields: tuple[Field, ...], *own: Field) -> tuple[Field, ...]:
    """`fields` with a family's own, which take the place of those of the same name."""
    names = {field.hf for field in own}
    return (*(field for field in fields if field.hf not in names), *own)


def key_value_heads(default: int) -> Field:
    """Where the config gives no number of key/value heads, transformers has one of the family's own; null is all."""
    return Field("num_key_value_heads", "num_query_groups", default, null=lambda hf: hf["num_attention_heads"])


def head_size(hf: HfConfig) -> int:
    """transformers' head size where the config does not give one."""
    return hf["hidden_size"] // hf["num_attention_heads"]
