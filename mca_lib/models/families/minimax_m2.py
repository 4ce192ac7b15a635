"""MiniMax M2: Mixtral's experts, chosen by sigmoids and a bias; norms over all heads, of which a part rotates."""

from mca_lib.converter.mappings import Replicated
from mca_lib.models.families.base import Family, Field, HfConfig, Neutral
from mca_lib.models.families.dense import ATTENTION, DENSE_FIELDS, EMBEDDINGS, head_size, key_value_heads, replaced
from mca_lib.models.families.mixtral import EXPERTS
from mca_lib.models.families.moe import MOE_FIELDS, MOE_NEUTRAL
from mca_lib.models.families.olmo2 import HEADS_NORM
from mca_lib.models.families.rows import publishers_code

_OWN = ("partial_rotary_factor", "auto_map")


def _share(hf: HfConfig) -> float:
    """Published configs have the channels that rotate, as `rotary_dim`."""
    return 1.0 if hf.get("rotary_dim") is None else hf["rotary_dim"] / (hf.get("head_dim") or 128)


FAMILY = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    fields=(
        *replaced(DENSE_FIELDS, key_value_heads(8)),
        *MOE_FIELDS,
        Field("max_position_embeddings", "max_position_embeddings", 196608),
        Field("head_dim", "kv_channels", 128, null=head_size),
        Field("num_local_experts", "moe.num_experts", aliases=("num_experts",)),
        Field("intermediate_size", "moe.ffn_hidden_size"),
    ),
    weights=(
        *EMBEDDINGS,
        *ATTENTION,
        *HEADS_NORM,
        *EXPERTS,
        Replicated(
            "decoder.layers.{layer}.mlp.router.expert_bias",
            "model.layers.{layer}.block_sparse_moe.e_score_correction_bias",
            ("moe.num_experts",),
        ),
    ),
    neutral=(
        *(rule for rule in MOE_NEUTRAL if rule.hf not in _OWN),
        publishers_code("_minimax_m2."),
        # Fields of the publisher's code.
        Neutral("scoring_func", ("sigmoid",)),
        Neutral("use_qk_norm", (True,)),
        Neutral("use_routing_bias", (True,)),
        Neutral("qk_norm_type", ("per_layer",)),
        # 1 is softmax attention; the publisher's earlier models have others too.
        Neutral("attn_type_list", (), unless=lambda hf: hf["attn_type_list"] == [1] * hf.get("num_hidden_layers", 0)),
        Neutral("shared_intermediate_size", (0,)),
    ),
    fixed={"qk_norm_over_heads": True, "moe.score_function": "sigmoid", "moe.expert_bias": True},
    derived={"moe.layers": lambda hf: tuple(range(hf["num_hidden_layers"]))},
    rope_base=5e6,
    rotary_share=_share,
)
