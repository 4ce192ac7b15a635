"""Qwen3.5, the language model: Qwen3-Next's layers with a dense MLP."""

from mca_lib.models.families.base import Family
from mca_lib.models.families.dense import DENSE_FIELDS, DENSE_NEUTRAL, EMBEDDINGS, MLP, key_value_heads, replaced
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

GATED_DELTA_NET = gated_delta_net(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), (3, 1, 1, 1))

FAMILY = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    fields=replaced(DENSE_FIELDS, key_value_heads(4), *FIELDS, MTP_FIELD),
    weights=(*EMBEDDINGS, *GATED_ATTENTION, *GATED_DELTA_NET, *MLP, *multi_token_prediction(MLP)),
    neutral=(*(rule for rule in DENSE_NEUTRAL if rule.hf != "partial_rotary_factor"), *NEUTRAL),
    fixed=FIXED,
    derived=DERIVED,
    rotary_share=ROTARY_SHARE,
    window=NoWindowBesideLinear(),
)
