"""Nemotron-H and Nemotron 3: Mamba-2, attention without positions, MLPs and experts with squared ReLU and no gate.

`layers_block_type` names each layer, or `hybrid_override_pattern` has Megatron's symbols.

transformers (5.24) does not let a step of a Mamba layer be shorter than `time_step_min` when it computes several tokens
at once, and lets it when it computes one; the models were trained without that limit, which Megatron does not have.
"""

from mca_lib.converter.mappings import QKV, Column, Replicated, Row, Vocabulary
from mca_lib.errors import ModelError
from mca_lib.models.families.base import Family, Field, HfConfig, Neutral
from mca_lib.models.families.layers import LayerNames
from mca_lib.models.families.rows import publishers_code
from mca_lib.models.families.window import FULL, Window, WindowRule
from mca_lib.models.hybrid.pattern import ATTENTION, MAMBA, MLP, MOE
from mca_lib.models.hybrid.weights import mamba_weights

LAYERS = LayerNames(
    names=("layers_block_type", "layer_types"),
    text="hybrid_override_pattern",
    symbols={
        "linear_attention": MAMBA,
        "mamba": MAMBA,
        "full_attention": ATTENTION,
        "attention": ATTENTION,
        "mlp": MLP,
        "moe": MOE,
    },
)
_MCA, _HF = "decoder.layers.{layer}.", "backbone.layers.{layer}."
_ATTENTION, _MLP, _MIXER = _MCA + "self_attention.", _MCA + "mlp.", _HF + "mixer."
_EXPERT, _HF_EXPERT = _MLP + "experts.experts.{expert}.", _MIXER + "experts.{expert}."
_QKV = tuple(f"{_MIXER}{name}_proj.weight" for name in "qkv")
_HIDDEN, _FFN, _EXPERT_FFN, _SHARED_FFN = (
    *("hidden_size", "ffn_hidden_size"),
    *("moe.ffn_hidden_size", "moe.shared_ffn_hidden_size"),
)
_SIZES = "hybrid.mamba."


class NoneAtAll(WindowRule):
    """The family has no windows."""

    def read(self, hf: HfConfig) -> Window:
        return FULL

    def spell(self, window: Window, hf: HfConfig) -> HfConfig:
        raise ModelError(f"model config: sliding_window={window[0]}: {hf.get('model_type')} has no sliding windows")


# fmt: off
EMBEDDINGS = (
    Vocabulary("embedding.word_embeddings.weight", "backbone.embeddings.weight"),
    Replicated("decoder.final_norm.weight",        "backbone.norm_f.weight", (_HIDDEN,)),
    Vocabulary("output_layer.weight",              "lm_head.weight", when="untied"),
)

ATTENTION_WEIGHTS = (
    Replicated(_ATTENTION + "linear_qkv.layer_norm_weight", _HF + "norm.weight", (_HIDDEN,), layers="attention_layers"),
    QKV(       _ATTENTION + "linear_qkv.weight",   _QKV, (_HIDDEN,), layers="attention_layers"),
    Row(       _ATTENTION + "linear_proj.weight",  _MIXER + "o_proj.weight", (_HIDDEN, "query_size"),
               layers="attention_layers"),
)

MLP_WEIGHTS = (
    Replicated(_MLP + "linear_fc1.layer_norm_weight", _HF + "norm.weight", (_HIDDEN,), layers="dense_layers"),
    Column(    _MLP + "linear_fc1.weight",         _MIXER + "up_proj.weight", (_FFN, _HIDDEN), layers="dense_layers"),
    Row(       _MLP + "linear_fc2.weight",         _MIXER + "down_proj.weight", (_HIDDEN, _FFN), layers="dense_layers"),
)

EXPERT_WEIGHTS = (
    Replicated(_MCA + "pre_mlp_layernorm.weight",  _HF + "norm.weight", (_HIDDEN,), layers="moe_layers"),
    Replicated(_MLP + "router.weight",             _MIXER + "gate.weight", ("moe.num_experts", _HIDDEN),
               layers="moe_layers"),
    Replicated(_MLP + "router.expert_bias",        _MIXER + "gate.e_score_correction_bias", ("moe.num_experts",),
               layers="moe_layers"),
    Column(    _EXPERT + "linear_fc1.weight",      _HF_EXPERT + "up_proj.weight", (_EXPERT_FFN, _HIDDEN),
               layers="moe_layers"),
    Row(       _EXPERT + "linear_fc2.weight",      _HF_EXPERT + "down_proj.weight", (_HIDDEN, _EXPERT_FFN),
               layers="moe_layers"),
    Column(    _MLP + "shared_experts.linear_fc1.weight", _MIXER + "shared_experts.up_proj.weight",
               (_SHARED_FFN, _HIDDEN), layers="moe_layers"),
    Row(       _MLP + "shared_experts.linear_fc2.weight", _MIXER + "shared_experts.down_proj.weight",
               (_HIDDEN, _SHARED_FFN), layers="moe_layers"),
)
# fmt: on

FAMILY = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    pattern=LAYERS,
    fields=(
        Field("hidden_size", "hidden_size", 4096),
        Field("intermediate_size", "ffn_hidden_size", 21504),
        Field("num_attention_heads", "num_attention_heads", 32),
        Field("num_key_value_heads", "num_query_groups", 8, null=lambda hf: hf.get("num_attention_heads", 32)),
        Field("head_dim", "kv_channels", 128),
        Field("vocab_size", "vocab_size", 131072),
        Field("max_position_embeddings", "max_position_embeddings", 4096),
        Field("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Field("layer_norm_epsilon", _SIZES + "norm_epsilon", 1e-5, layers=MAMBA),
        Field("attention_dropout", "attention_dropout", 0.0),
        Field("initializer_range", "initializer_range", 0.02),
        Field("mamba_num_heads", _SIZES + "num_heads", 128, layers=MAMBA),
        Field("mamba_head_dim", _SIZES + "head_dim", 64, layers=MAMBA),
        Field("ssm_state_size", _SIZES + "state_size", 128, layers=MAMBA),
        Field("n_groups", _SIZES + "num_groups", 8, aliases=("mamba_n_groups",), layers=MAMBA),
        Field("conv_kernel", _SIZES + "conv_kernel", 4, aliases=("mamba_d_conv",), layers=MAMBA),
        Field("chunk_size", _SIZES + "chunk_size", 128, aliases=("mamba_chunk_size",), layers=MAMBA),
        Field("n_routed_experts", "moe.num_experts", 8, aliases=("num_local_experts",), layers=MOE),
        Field("num_experts_per_tok", "moe.topk", 2, layers=MOE),
        Field("moe_intermediate_size", "moe.ffn_hidden_size", 7688, layers=MOE),
        Field("moe_shared_expert_intermediate_size", "moe.shared_ffn_hidden_size", 7688, layers=MOE),
        Field("routed_scaling_factor", "moe.scaling_factor", 1.0, layers=MOE),
        Field("n_group", "moe.num_groups", 1, layers=MOE),
        Field("topk_group", "moe.group_topk", 1, layers=MOE),
    ),
    weights=(
        *EMBEDDINGS,
        *ATTENTION_WEIGHTS,
        *MLP_WEIGHTS,
        *EXPERT_WEIGHTS,
        *mamba_weights(_HF + "norm.", _MIXER),
    ),
    neutral=(
        Neutral("tie_word_embeddings", (False,)),  # transformers does not tie them, whatever the field says
        Neutral("mlp_hidden_act", ("relu2",)),
        Neutral("mamba_hidden_act", ("silu", "swish")),
        Neutral("attention_bias", (False,)),
        Neutral("mlp_bias", (False,)),
        Neutral("use_bias", (False,)),
        Neutral("mamba_proj_bias", (False,)),
        Neutral("use_conv_bias", (True,), null_is_absent=False),
        Neutral("mamba_conv_bias", (True,), null_is_absent=False),
        *(
            Neutral(name, ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}]))
            for name in ("time_step_limit", "mamba_dt_limit")
        ),
        Neutral("sliding_window", ()),
        Neutral("residual_in_fp32", (False,)),
        Neutral("hidden_dropout", (0.0,)),
        Neutral("norm_topk_prob", (True,), null_is_absent=False),
        Neutral("moe_latent_size", ()),
        Neutral("num_nextn_predict_layers", (0,)),
        Neutral("is_encoder_decoder", (False,)),
        Neutral("add_cross_attention", (False,)),
        Neutral("is_causal", (True,), null_is_absent=False),
        publishers_code("_nemotron_h."),
    ),
    fixed={"activation": "relu2", "rotary": False, "moe.score_function": "sigmoid", "moe.expert_bias": True},
    window=NoneAtAll(),
    copies=(),
)
