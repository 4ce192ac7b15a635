"""What a family's model is made of beside the Llama layer, and what it cannot do, in a few words each. No torch."""

from collections.abc import Callable, Iterator

from mca_lib.errors import ConfigError, ModelError
from mca_lib.models.config import ROPE_TYPES, HybridLayers, Mamba2, McaModelConfig
from mca_lib.models.hybrid.pattern import ATTENTION, MAMBA, MLP, MOE
from mca_lib.verification.card import Card

Words = str | Callable[[McaModelConfig], str]

FEATURES: tuple[tuple[Callable[[McaModelConfig], object], Words], ...] = (
    (lambda c: c.vision, "vision tower"),
    (lambda c: c.hybrid and c.hybrid.mamba, "Mamba-2 layers"),
    (lambda c: c.gated_delta_net, "gated delta nets"),
    (lambda c: c.latent_attention, "latent attention"),
    (lambda c: c.attention_output_gate, "gated attention"),
    (lambda c: c.attention_sinks, "attention sinks"),
    (lambda c: c.query_pre_attn_scalar, "scores scaled by a size of their own"),
    (lambda c: c.sliding_window, lambda c: "windows in some layers" if c.full_attention_layers else "windows"),
    (lambda c: not c.rotary, "no positions"),
    (lambda c: c.rope_scaling, lambda c: f"{_kind(c)} rope"),
    (lambda c: c.rotary_channels, "a part of a head rotates"),
    (lambda c: c.sliding_rotary_base, "another rope in layers with a window"),
    (lambda c: c.qk_layernorm and not c.latent_attention, "norms of queries and keys"),
    (lambda c: c.qk_norm_over_heads, "norms of queries and keys over all heads"),
    (lambda c: c.post_norms, lambda c: "norms before and after" if c.pre_norms else "norms after"),
    (lambda c: c.zero_centered_norms, "zero-centred norms"),
    (lambda c: c.qkv_bias or c.attention_output_bias or c.mlp_bias, lambda c: f"biases ({_biases(c)})"),
    (lambda c: c.activation != "swiglu", lambda c: c.activation),
    (lambda c: c.activation_clamp, "clamped gates"),
    (lambda c: c.glu_linear_offset, "an offset beside gates"),
    (lambda c: c.moe, lambda c: f"experts ({c.moe.score_function})"),
    (lambda c: c.moe and c.moe.num_groups, "groups of experts"),
    (lambda c: c.moe and c.moe.expert_bias, "biases that balance experts"),
    (lambda c: c.moe and c.moe.bias, "biases of experts"),
    (lambda c: c.moe and c.moe.has_shared, lambda c: f"{'gated ' if c.moe.shared_gate else ''}shared expert"),
    (lambda c: c.moe and not c.hybrid and c.dense_layers, "dense layers among those with experts"),
    (lambda c: c.mtp_num_layers, "multi-token prediction"),
    (lambda c: c.embedding_multiplier != 1, "scaled embeddings"),
    (lambda c: c.tie_word_embeddings, "tied embeddings"),
    (lambda c: c.residual_dropout, "dropout on the residual"),
)
"""(Has a model it? What is it called?)"""


def features(config: McaModelConfig) -> list[str]:
    """Of a model, in the order of the table."""
    return [words if isinstance(words, str) else words(config) for has, words in FEATURES if has(config)]


def known_limits(card: Card, config: McaModelConfig) -> Iterator[str]:
    """What the model of a family's card cannot do; the card has the fields that are refused."""
    lacks = ("has no experts",)
    refused = [r for r in card.layouts if r.refused is not None and not any(text in r.refused for text in lacks)]
    yield from (f"{r.layout} refused" for r in refused)
    if config.mtp_num_layers:
        yield "multi-token prediction: compared by its bytes"
    if config.hybrid is None and not _becomes_hybrid(config):
        yield "no hybrid with all of these"
    yield f"{len(card.unsupported)} kinds of fields refused"


def _becomes_hybrid(config: McaModelConfig) -> bool:
    pattern = MAMBA + (ATTENTION + (MLP if config.moe is None else MOE)) * config.num_layers
    try:
        config.with_hybrid(HybridLayers(pattern, Mamba2(num_heads=4, head_dim=16)))
    except (ConfigError, ModelError):
        return False
    return True


def _kind(config: McaModelConfig) -> str:
    return next(name for name, cls in ROPE_TYPES.items() if type(config.rope_scaling) is cls)


def _biases(config: McaModelConfig) -> str:
    named = {"q k v": config.qkv_bias, "o": config.attention_output_bias, "MLP": config.mlp_bias}
    return " ".join(name for name, there in named.items() if there)
