"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts in place of some MLPs, and a gated expert that every token goes to."""

from mca_lib.models.families.base import Family, Field
from mca_lib.models.families.dense import DENSE_FIELDS, DENSE_WEIGHTS, QKV_BIAS, head_size, key_value_heads, replaced
from mca_lib.models.families.moe import (
    EXPERT_WEIGHTS,
    MOE_NEUTRAL,
    QWEN_MOE_FIELDS,
    shared_expert_gate,
    shared_expert_weights,
    sparse_layers,
)
from mca_lib.models.families.window import SwitchedWindow

FAMILY = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    fields=(
        *replaced(DENSE_FIELDS, key_value_heads(16)),
        *QWEN_MOE_FIELDS,
        Field("max_position_embeddings", "max_position_embeddings", 32768),
        Field("head_dim", "kv_channels", head_size),
        Field("qkv_bias", "qkv_bias", True),
        Field("shared_expert_intermediate_size", "moe.shared_ffn_hidden_size", 5632),
    ),
    weights=(
        *DENSE_WEIGHTS,
        *QKV_BIAS,
        *EXPERT_WEIGHTS,
        *shared_expert_weights("mlp.shared_expert"),
        *shared_expert_gate("mlp.shared_expert_gate.weight"),
    ),
    neutral=MOE_NEUTRAL,
    fixed={"moe.shared_gate": True},
    derived={"moe.layers": sparse_layers},
    window=SwitchedWindow(windowed=lambda layer, limit: layer % 2 == 0 and layer < limit),
)
