"""What the families with experts have in common, beside what they share with the dense ones (`dense.py`)."""

from mca_lib.converter.mapping import Mapping
from mca_lib.converter.mappings import GatedMLP, Replicated, Row
from mca_lib.models.families.base import Field, HfConfig, Neutral
from mca_lib.models.families.dense import DENSE_NEUTRAL

MOE_FIELDS = (
    Field("num_experts_per_tok", "moe.topk"),
    Field("router_aux_loss_coef", "moe.aux_loss_coeff", 0.001),
)

QWEN_MOE_FIELDS = (
    *MOE_FIELDS,
    Field("num_experts", "moe.num_experts", aliases=("num_local_experts",)),
    Field("moe_intermediate_size", "moe.ffn_hidden_size"),
    Field("norm_topk_prob", "moe.normalize_topk", False),
)

MOE_NEUTRAL = (
    *(rule for rule in DENSE_NEUTRAL if rule.hf not in ("num_experts", "num_local_experts")),
    # Noise on the router's input in training.
    Neutral("router_jitter_noise", (0.0,)),
)

_MCA, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."


# fmt: off
def expert_weights(
    gate: str, up: str, down: str, router: str = "mlp.gate.weight", mca: str = _MCA, layers: str | None = "moe_layers"
) -> tuple[Mapping, ...]:
    """Norm, router and experts; the names of an expert's projections are those within a Hugging Face layer."""
    ffn, hidden = "moe.ffn_hidden_size", "hidden_size"
    return (
        Replicated(mca + "pre_mlp_layernorm.weight", _HF + "post_attention_layernorm.weight", (hidden,), layers=layers),
        Replicated(mca + "mlp.router.weight",        _HF + router, ("moe.num_experts", hidden), layers=layers),
        GatedMLP(  mca + "mlp.experts.experts.{expert}.linear_fc1.weight", (_HF + gate, _HF + up), (ffn, hidden),
                   layers=layers),
        Row(       mca + "mlp.experts.experts.{expert}.linear_fc2.weight", _HF + down, (hidden, ffn), layers=layers),
    )


def shared_expert_weights(module: str, mca: str = _MCA, layers: str | None = "moe_layers") -> tuple[Mapping, ...]:
    """The expert that every token goes to; `module` is its name within a Hugging Face layer."""
    ffn, hidden, hf = "moe.shared_ffn_hidden_size", "hidden_size", _HF + module
    return (
        GatedMLP(mca + "mlp.shared_experts.linear_fc1.weight", (hf + ".gate_proj.weight", hf + ".up_proj.weight"),
                 (ffn, hidden), layers=layers),
        Row(     mca + "mlp.shared_experts.linear_fc2.weight", hf + ".down_proj.weight", (hidden, ffn), layers=layers),
    )


def shared_expert_gate(module: str) -> tuple[Mapping, ...]:
    """[1, hidden]: how much of the shared expert a token takes."""
    return (Replicated(_MCA + "mlp.shared_experts.gate_weight", _HF + module, (1, "hidden_size"),
                       layers="moe_layers"),)
# fmt: on


EXPERT_WEIGHTS = expert_weights(*(f"mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")))


def sparse_layers(hf: HfConfig) -> tuple[int, ...]:
    """Layers with experts of a Qwen model: every `decoder_sparse_step`-th, but for `mlp_only_layers`."""
    step, dense = hf.get("decoder_sparse_step") or 1, hf.get("mlp_only_layers") or ()
    return tuple(i for i in range(hf["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)
