"""Mixtral: the Mistral layer with experts in place of every MLP."""

from mca_lib.models.families.base import Family, Field
from mca_lib.models.families.dense import ATTENTION, DENSE_FIELDS, EMBEDDINGS, head_size, key_value_heads, replaced
from mca_lib.models.families.moe import MOE_FIELDS, MOE_NEUTRAL, expert_weights
from mca_lib.models.families.window import OneWindow

_EXPERT = "block_sparse_moe.experts.{expert}."

EXPERTS = expert_weights(
    *(_EXPERT + name + ".weight" for name in ("w1", "w3", "w2")), router="block_sparse_moe.gate.weight"
)

FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields=(
        *replaced(DENSE_FIELDS, Field("rms_norm_eps", "norm_epsilon", 1e-5), key_value_heads(8)),
        *MOE_FIELDS,
        Field("max_position_embeddings", "max_position_embeddings", 131072),
        Field("head_dim", "kv_channels", head_size),
        Field("num_local_experts", "moe.num_experts", aliases=("num_experts",)),
        Field("intermediate_size", "moe.ffn_hidden_size"),
    ),
    weights=(
        *EMBEDDINGS,
        *ATTENTION,
        *EXPERTS,
    ),
    neutral=MOE_NEUTRAL,
    derived={"moe.layers": lambda hf: tuple(range(hf["num_hidden_layers"]))},
    rope_base=1e6,
    window=OneWindow(default=None),
)
