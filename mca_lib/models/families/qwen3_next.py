"""Qwen3-Next: gated delta nets and gated attention in turns, many small experts and a gated one for every token."""

from dataclasses import replace

from mca_lib.models.families.base import Family, Field
from mca_lib.models.families.dense import DENSE_FIELDS, EMBEDDINGS, MLP, key_value_heads, replaced
from mca_lib.models.families.linear_attention import (
    DERIVED,
    FIELDS,
    FIXED,
    GATED_ATTENTION,
    MTP_FIELD,
    NEUTRAL,
    ROTARY_SHARE,
    NoWindowBesideLinear,
    gated_delta_net,
    multi_token_prediction,
)
from mca_lib.models.families.moe import (
    EXPERT_WEIGHTS,
    MOE_NEUTRAL,
    QWEN_MOE_FIELDS,
    shared_expert_gate,
    shared_expert_weights,
    sparse_layers,
)

_EXPERTS = (
    *EXPERT_WEIGHTS,
    *shared_expert_weights("mlp.shared_expert"),
    *shared_expert_gate("mlp.shared_expert_gate.weight"),
)

FAMILY = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    fields=(
        *replaced(
            (*DENSE_FIELDS, *QWEN_MOE_FIELDS),
            key_value_heads(2),
            Field("norm_topk_prob", "moe.normalize_topk", True),
        ),
        *FIELDS,
        Field("shared_expert_intermediate_size", "moe.shared_ffn_hidden_size", 512),
        # The published config says nothing of the layer; where the files have none, the model has none.
        replace(MTP_FIELD, default=1),
    ),
    weights=(
        *EMBEDDINGS,
        *GATED_ATTENTION,
        # For each key head: query, key, and values and gates of its value heads; then rates and decays of these.
        *gated_delta_net(("in_proj_qkvz", "in_proj_ba"), (4, 2), "gated_delta_net.num_key_heads"),
        *MLP,
        *_EXPERTS,
        *multi_token_prediction(_EXPERTS),
    ),
    neutral=(*(rule for rule in MOE_NEUTRAL if rule.hf != "partial_rotary_factor"), *NEUTRAL),
    fixed={**FIXED, "moe.shared_gate": True},
    derived={**DERIVED, "moe.layers": sparse_layers},
    rotary_share=ROTARY_SHARE,
    window=NoWindowBesideLinear(),
)
