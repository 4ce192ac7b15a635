"""The hybrids that `mca_lib.converter.remote_code` has the code of: a transformer's layers and Mamba-2 layers.

An export of a hybrid that started from a transformer is of this family; no architecture of transformers has its
mathematics. A layer is a norm and one of `self_attn`, `mlp` (dense, or experts) and `mamba`.
"""

from dataclasses import replace

from mca_lib.converter.mappings import QKV, GatedMLP, Replicated, Row, Vocabulary
from mca_lib.models.config import McaModelConfig
from mca_lib.models.families.base import REQUIRED, Family, Field, HfConfig, Neutral
from mca_lib.models.families.dense import DENSE_FIELDS
from mca_lib.models.families.layers import PatternText
from mca_lib.models.families.window import Window, WindowRule
from mca_lib.models.hybrid.pattern import MAMBA, MOE
from mca_lib.models.hybrid.weights import mamba_weights

MODEL_TYPE = "mcaflow_hybrid"
_MCA, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."
_ATTENTION, _MLP = _MCA + "self_attention.", _MCA + "mlp."
_HF_ATTENTION, _HF_MLP = _HF + "self_attn.", _HF + "mlp."
_EXPERT, _SHARED = _HF_MLP + "experts.{expert}.", _HF_MLP + "shared_expert."
_FFN, _EXPERT_FFN, _SHARED_FFN = "ffn_hidden_size", "moe.ffn_hidden_size", "moe.shared_ffn_hidden_size"


def _qkv(kind: str) -> tuple[str, ...]:
    return tuple(f"{_HF_ATTENTION}{name}_proj.{kind}" for name in "qkv")


def _gate_up(module: str, kind: str = "weight") -> tuple[str, ...]:
    return tuple(f"{module}{name}_proj.{kind}" for name in ("gate", "up"))


# fmt: off
EMBEDDINGS = (
    Vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    Replicated("decoder.final_norm.weight",        "model.norm.weight", ("hidden_size",)),
    Vocabulary("output_layer.weight",              "lm_head.weight", when="untied"),
)

ATTENTION = (
    Replicated(_ATTENTION + "linear_qkv.layer_norm_weight", _HF + "norm.weight", ("hidden_size",),
               layers="attention_layers"),
    QKV(       _ATTENTION + "linear_qkv.weight",   _qkv("weight"), ("hidden_size",), layers="attention_layers"),
    QKV(       _ATTENTION + "linear_qkv.bias",     _qkv("bias"), (), layers="attention_layers",
               when="qkv_bias"),
    Replicated(_ATTENTION + "q_layernorm.weight",  _HF_ATTENTION + "q_norm.weight", ("kv_channels",),
               layers="attention_layers", when="qk_layernorm"),
    Replicated(_ATTENTION + "k_layernorm.weight",  _HF_ATTENTION + "k_norm.weight", ("kv_channels",),
               layers="attention_layers", when="qk_layernorm"),
    Row(       _ATTENTION + "linear_proj.weight",  _HF_ATTENTION + "o_proj.weight", ("hidden_size", "query_size"),
               layers="attention_layers"),
    Replicated(_ATTENTION + "linear_proj.bias",    _HF_ATTENTION + "o_proj.bias", ("hidden_size",),
               layers="attention_layers", when="attention_output_bias"),
)

MLP = (
    Replicated(_MLP + "linear_fc1.layer_norm_weight", _HF + "norm.weight", ("hidden_size",), layers="dense_layers"),
    GatedMLP(  _MLP + "linear_fc1.weight",         _gate_up(_HF_MLP), layers="dense_layers"),
    GatedMLP(  _MLP + "linear_fc1.bias",           _gate_up(_HF_MLP, "bias"), (_FFN,), layers="dense_layers",
               when="mlp_bias"),
    Row(       _MLP + "linear_fc2.weight",         _HF_MLP + "down_proj.weight", ("hidden_size", _FFN),
               layers="dense_layers"),
    Replicated(_MLP + "linear_fc2.bias",           _HF_MLP + "down_proj.bias", ("hidden_size",), layers="dense_layers",
               when="mlp_bias"),
)

EXPERTS = (
    Replicated(_MCA + "pre_mlp_layernorm.weight",  _HF + "norm.weight", ("hidden_size",), layers="moe_layers"),
    Replicated(_MLP + "router.weight",             _HF_MLP + "gate.weight", ("moe.num_experts", "hidden_size"),
               layers="moe_layers"),
    GatedMLP(  _MLP + "experts.experts.{expert}.linear_fc1.weight", _gate_up(_EXPERT),
               (_EXPERT_FFN, "hidden_size"), layers="moe_layers"),
    Row(       _MLP + "experts.experts.{expert}.linear_fc2.weight", _EXPERT + "down_proj.weight",
               ("hidden_size", _EXPERT_FFN), layers="moe_layers"),
    GatedMLP(  _MLP + "shared_experts.linear_fc1.weight", _gate_up(_SHARED), (_SHARED_FFN, "hidden_size"),
               layers="moe_layers", when="moe.has_shared"),
    Row(       _MLP + "shared_experts.linear_fc2.weight", _SHARED + "down_proj.weight", ("hidden_size", _SHARED_FFN),
               layers="moe_layers", when="moe.has_shared"),
    Replicated(_MLP + "shared_experts.gate_weight", _HF_MLP + "shared_expert_gate.weight", (1, "hidden_size"),
               layers="moe_layers", when="moe.shared_gate"),
)
# fmt: on

SOURCE = ("bos_token_id", "eos_token_id", "pad_token_id", "use_cache")
"""Fields of a source's config.json that an export keeps; the others are of another architecture."""
AUTO_MAP = {
    "AutoConfig": "configuration_mcaflow_hybrid.McaflowHybridConfig",
    "AutoModelForCausalLM": "modeling_mcaflow_hybrid.McaflowHybridForCausalLM",
}
_MAMBA = "hybrid.mamba."


class ListedWindow(WindowRule):
    """A window, and a list of the layers without it."""

    def read(self, hf: HfConfig) -> Window:
        window = hf.get("sliding_window")
        return (None, ()) if window is None else (window, tuple(hf.get("full_attention_layers") or ()))

    def spell(self, window: Window, hf: HfConfig) -> HfConfig:
        return {"sliding_window": window[0], "full_attention_layers": list(window[1])}


FAMILY = Family(
    model_type=MODEL_TYPE,
    architecture="McaflowHybridForCausalLM",
    pattern=PatternText("hybrid_layer_pattern"),
    fields=(
        *(replace(field, default=REQUIRED) for field in DENSE_FIELDS if field.hf != "num_hidden_layers"),
        Field("max_position_embeddings", "max_position_embeddings"),
        Field("head_dim", "kv_channels"),
        Field("attention_bias", "qkv_bias"),
        Field("attention_output_bias", "attention_output_bias"),
        Field("mlp_bias", "mlp_bias"),
        Field("use_qk_norm", "qk_layernorm"),
        Field("mamba_num_heads", _MAMBA + "num_heads", layers=MAMBA),
        Field("mamba_head_dim", _MAMBA + "head_dim", layers=MAMBA),
        Field("mamba_state_size", _MAMBA + "state_size", layers=MAMBA),
        Field("mamba_num_groups", _MAMBA + "num_groups", layers=MAMBA),
        Field("mamba_conv_kernel", _MAMBA + "conv_kernel", layers=MAMBA),
        Field("mamba_chunk_size", _MAMBA + "chunk_size", layers=MAMBA),
        Field("mamba_norm_eps", _MAMBA + "norm_epsilon", layers=MAMBA),
        Field("num_experts", "moe.num_experts", layers=MOE),
        Field("num_experts_per_tok", "moe.topk", layers=MOE),
        Field("moe_intermediate_size", "moe.ffn_hidden_size", layers=MOE),
        Field("norm_topk_prob", "moe.normalize_topk", layers=MOE),
        Field("routed_scaling_factor", "moe.scaling_factor", layers=MOE),
        Field("shared_expert_intermediate_size", "moe.shared_ffn_hidden_size", None, layers=MOE),
        Field("use_shared_expert_gate", "moe.shared_gate", layers=MOE),
        Field("router_aux_loss_coef", "moe.aux_loss_coeff", layers=MOE),
    ),
    weights=(*EMBEDDINGS, *ATTENTION, *MLP, *EXPERTS, *mamba_weights(_HF + "norm.", _HF + "mamba.")),
    neutral=(Neutral("auto_map", (AUTO_MAP,)), Neutral("hidden_act", ("silu", "swish"))),
    window=ListedWindow(),
)


def exported_config(config: McaModelConfig) -> McaModelConfig:
    """The model as one of this family, whichever it was.

    Raises ModelError naming what the family has no field for.
    """
    if config.model_type == MODEL_TYPE:
        return config
    kept = {name: config.hf_config[name] for name in SOURCE if name in config.hf_config}
    return replace(config, model_type=MODEL_TYPE, hf_config=kept | {"auto_map": AUTO_MAP})
