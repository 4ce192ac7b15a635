"""GLM 4.5 to 4.7: grouped-query attention of whose heads a part rotates, with the experts of DeepSeek V3.

The multi-token prediction layers are stored as there: as further layers, with copies of embedding and output layer.
"""

from dataclasses import replace

from mca_lib.models.families.base import Family, Field, Neutral
from mca_lib.models.families.deepseek_v3 import COPIES, EXPERTS, MTP, given, in_mtp, shared_size
from mca_lib.models.families.dense import (
    ATTENTION,
    DENSE_FIELDS,
    EMBEDDINGS,
    MLP,
    QK_NORM,
    QKV_BIAS,
    head_size,
    key_value_heads,
    replaced,
)
from mca_lib.models.families.moe import MOE_FIELDS, MOE_NEUTRAL

_ATTENTION = (*ATTENTION, *QKV_BIAS, *(replace(row, when="qk_layernorm") for row in QK_NORM))

FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    fields=(
        *replaced(DENSE_FIELDS, key_value_heads(8), Field("rms_norm_eps", "norm_epsilon", 1e-5)),
        *MOE_FIELDS,
        Field("max_position_embeddings", "max_position_embeddings", 131072),
        Field("head_dim", "kv_channels", head_size),
        Field("attention_bias", "qkv_bias", False),
        Field("use_qk_norm", "qk_layernorm", False),
        Field("n_routed_experts", "moe.num_experts", aliases=("num_local_experts",)),
        Field("moe_intermediate_size", "moe.ffn_hidden_size"),
        Field("n_group", "moe.num_groups", 1),
        Field("topk_group", "moe.group_topk", 1),
        Field("routed_scaling_factor", "moe.scaling_factor", 1.0),
        Field("num_nextn_predict_layers", "mtp_num_layers", 1, aliases=("num_mtp_layers",)),
    ),
    weights=(*EMBEDDINGS, *_ATTENTION, *MLP, *EXPERTS, *MTP, *(in_mtp(row) for row in (*_ATTENTION, *EXPERTS))),
    neutral=(
        *(rule for rule in MOE_NEUTRAL if rule.hf != "partial_rotary_factor"),
        Neutral("norm_topk_prob", (True,), null_is_absent=False),
        # DeepSeek's words for what the model always does.
        Neutral("scoring_func", ("sigmoid",)),
        Neutral("topk_method", ("noaux_tc",)),
    ),
    fixed={"moe.score_function": "sigmoid", "moe.expert_bias": True},
    derived={
        "moe.layers": lambda hf: tuple(range(given(hf, "first_k_dense_replace", 1), hf["num_hidden_layers"])),
        "moe.shared_ffn_hidden_size": shared_size,
    },
    rotary_share=0.5,
    copies=COPIES,
)
