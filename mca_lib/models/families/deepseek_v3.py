"""DeepSeek V3 and R1, Moonlight: latent attention, many small experts after a few dense layers, multi-token prediction.

The multi-token prediction layers are stored as further layers, with a copy each of the embedding and the output layer.
"""

from dataclasses import replace

from mca_lib.converter.mapping import Mapping
from mca_lib.converter.mappings import Column, Replicated, Row
from mca_lib.models.families.base import TIED_HEAD, Copy, Family, Field, HfConfig, Neutral
from mca_lib.models.families.dense import DENSE_FIELDS, EMBEDDINGS, MLP, key_value_heads, replaced
from mca_lib.models.families.moe import EXPERT_WEIGHTS, MOE_FIELDS, MOE_NEUTRAL, shared_expert_weights
from mca_lib.models.families.rows import publishers_code

_MCA, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."
_MTP = "mtp.layers.{mtp}."
_ATTENTION, _HF_ATTENTION = _MCA + "self_attention.", _HF + "self_attn."
_LATENT = "latent_attention."

# fmt: off
LATENT_ATTENTION = (
    Replicated(_MCA + "input_layernorm.weight",              _HF + "input_layernorm.weight", ("hidden_size",)),
    Column(    _ATTENTION + "linear_q_proj.weight",          _HF_ATTENTION + "q_proj.weight",
               ("query_key_size", "hidden_size"), when=_LATENT + "direct_q"),
    Column(    _ATTENTION + "linear_q_down_proj.weight",     _HF_ATTENTION + "q_a_proj.weight",
               (_LATENT + "q_lora_rank", "hidden_size"), when=_LATENT + "has_q_lora"),
    Replicated(_ATTENTION + "linear_q_up_proj.layer_norm_weight",
                                                             _HF_ATTENTION + "q_a_layernorm.weight",
               (_LATENT + "q_lora_rank",), when=_LATENT + "has_q_lora"),
    Column(    _ATTENTION + "linear_q_up_proj.weight",       _HF_ATTENTION + "q_b_proj.weight",
               ("query_key_size", _LATENT + "q_lora_rank"), when=_LATENT + "has_q_lora"),
    Column(    _ATTENTION + "linear_kv_down_proj.weight",    _HF_ATTENTION + "kv_a_proj_with_mqa.weight",
               (_LATENT + "kv_down_size", "hidden_size")),
    Replicated(_ATTENTION + "linear_kv_up_proj.layer_norm_weight",
                                                             _HF_ATTENTION + "kv_a_layernorm.weight",
               (_LATENT + "kv_lora_rank",)),
    Column(    _ATTENTION + "linear_kv_up_proj.weight",      _HF_ATTENTION + "kv_b_proj.weight",
               ("key_value_up_size", _LATENT + "kv_lora_rank")),
    Row(       _ATTENTION + "linear_proj.weight",            _HF_ATTENTION + "o_proj.weight",
               ("hidden_size", "query_size")),
)

EXPERTS = (
    *EXPERT_WEIGHTS,
    Replicated(_MCA + "mlp.router.expert_bias",              _HF + "mlp.gate.e_score_correction_bias",
               ("moe.num_experts",), layers="moe_layers"),
    *(replace(row, when="moe.has_shared") for row in shared_expert_weights("mlp.shared_experts")),
)

MTP = (
    Replicated(_MTP + "enorm.weight",                        _HF + "enorm.weight", ("hidden_size",)),
    Replicated(_MTP + "hnorm.weight",                        _HF + "hnorm.weight", ("hidden_size",)),
    Column(    _MTP + "eh_proj.weight",                      _HF + "eh_proj.weight",
               ("hidden_size", "twice_hidden_size")),
    Replicated(_MTP + "final_layernorm.weight",              _HF + "shared_head.norm.weight", ("hidden_size",)),
)
# fmt: on

COPIES = (
    TIED_HEAD,
    Copy(_HF + "embed_tokens.weight", of="model.embed_tokens.weight"),
    Copy(_HF + "shared_head.head.weight", of="lm_head.weight"),
)


def in_mtp(row: Mapping) -> Mapping:
    """The row of a layer, for the layer within a multi-token prediction layer."""
    return replace(row, mca=row.mca.replace(_MCA, _MTP + "transformer_layer."), layers=None)


def given(hf: HfConfig, name: str, default: int) -> int:
    """A field of the config, and what stands for its absence or null."""
    return default if hf.get(name) is None else hf[name]


def shared_size(hf: HfConfig) -> int | None:
    """The shared experts are one MLP that is as wide as all of them."""
    return given(hf, "n_shared_experts", 1) * hf["moe_intermediate_size"] or None


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    fields=(
        *replaced(DENSE_FIELDS, key_value_heads(128)),
        *MOE_FIELDS,
        Field("max_position_embeddings", "max_position_embeddings", 4096),
        Field("kv_lora_rank", _LATENT + "kv_lora_rank", 512),
        Field("q_lora_rank", _LATENT + "q_lora_rank", lambda hf: None if "q_lora_rank" in hf else 1536),
        Field("qk_nope_head_dim", _LATENT + "qk_nope_head_dim", 128),
        Field("qk_rope_head_dim", _LATENT + "qk_rope_head_dim", 64),
        Field("v_head_dim", (_LATENT + "v_head_dim", "kv_channels"), 128),
        Field("n_routed_experts", "moe.num_experts", aliases=("num_local_experts",)),
        Field("moe_intermediate_size", "moe.ffn_hidden_size"),
        Field("n_group", "moe.num_groups", 8),
        Field("topk_group", "moe.group_topk", 4),
        Field("routed_scaling_factor", "moe.scaling_factor", 2.5),
        Field("num_nextn_predict_layers", "mtp_num_layers", 1, aliases=("num_mtp_layers",)),
    ),
    weights=(
        *EMBEDDINGS,
        *LATENT_ATTENTION,
        *MLP,
        *EXPERTS,
        *MTP,
        *(in_mtp(row) for row in (*LATENT_ATTENTION, *EXPERTS)),
    ),
    neutral=(
        *(rule for rule in MOE_NEUTRAL if rule.hf != "auto_map"),
        publishers_code("_deepseek."),
        Neutral("attention_bias", (False,)),
        Neutral("rope_interleave", (True,), null_is_absent=False),
        Neutral("norm_topk_prob", (True,), null_is_absent=False),
        Neutral("scoring_func", ("sigmoid",)),
        Neutral("topk_method", ("noaux_tc",)),
        Neutral("moe_layer_freq", (1,)),
    ),
    fixed={"moe.score_function": "sigmoid", "moe.expert_bias": True},
    derived={
        "moe.layers": lambda hf: tuple(range(given(hf, "first_k_dense_replace", 3), hf["num_hidden_layers"])),
        "moe.shared_ffn_hidden_size": shared_size,
    },
    copies=COPIES,
)
