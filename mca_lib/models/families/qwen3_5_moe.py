"""Qwen3.5 with experts in place of every MLP, and a gated expert that every token goes to; the language model."""

from mca_lib.models.families.base import Family, Field, Neutral
from mca_lib.models.families.dense import DENSE_FIELDS, EMBEDDINGS, key_value_heads, replaced
from mca_lib.models.families.linear_attention import (
    DERIVED,
    FIELDS,
    FIXED,
    GATED_ATTENTION,
    MTP_FIELD,
    NEUTRAL,
    ROTARY_SHARE,
    NoWindowBesideLinear,
    multi_token_prediction,
)
from mca_lib.models.families.moe import (
    EXPERT_WEIGHTS,
    MOE_NEUTRAL,
    QWEN_MOE_FIELDS,
    shared_expert_gate,
    shared_expert_weights,
)
from mca_lib.models.families.qwen3_5 import GATED_DELTA_NET

_FIELDS = (
    field for field in (*DENSE_FIELDS, *QWEN_MOE_FIELDS) if field.hf not in ("intermediate_size", "norm_topk_prob")
)

_EXPERTS = (
    *EXPERT_WEIGHTS,
    *shared_expert_weights("mlp.shared_expert"),
    *shared_expert_gate("mlp.shared_expert_gate.weight"),
)

# Qwen3-Next's fields, which have no effect here.
_ALL_SPARSE = (
    Neutral("norm_topk_prob", (True,)),
    Neutral("mlp_only_layers", ([],)),
    Neutral("decoder_sparse_step", (1,)),
)

FAMILY = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    fields=replaced(
        tuple(_FIELDS),
        key_value_heads(2),
        *FIELDS,
        MTP_FIELD,
        Field("num_experts_per_tok", "moe.topk", 8),
        Field("num_experts", "moe.num_experts", 256, aliases=("num_local_experts",)),
        Field("moe_intermediate_size", ("moe.ffn_hidden_size", "ffn_hidden_size"), 512),
        Field("shared_expert_intermediate_size", "moe.shared_ffn_hidden_size", 512),
    ),
    weights=(
        *EMBEDDINGS,
        *GATED_ATTENTION,
        *GATED_DELTA_NET,
        *_EXPERTS,
        *multi_token_prediction(_EXPERTS),
    ),
    neutral=(*(rule for rule in MOE_NEUTRAL if rule.hf != "partial_rotary_factor"), *NEUTRAL, *_ALL_SPARSE),
    fixed={**FIXED, "moe.shared_gate": True, "moe.normalize_topk": True},
    derived={**DERIVED, "moe.layers": lambda hf: tuple(range(hf["num_hidden_layers"]))},
    rotary_share=ROTARY_SHARE,
    window=NoWindowBesideLinear(),
    stacked_experts=True,
)
