"""Fields of `McaModelConfig` that must fit each other, and a hybrid that must fit a transformer. No torch.

Checks of fields raise ModelError naming them.
"""

from typing import TYPE_CHECKING

from mca_lib.errors import ConfigError, ModelError
from mca_lib.models.config_parts import HybridLayers, LinearRope, Llama3Rope, LongRope, YarnRope
from mca_lib.models.hybrid.pattern import MOE, LayerMap, check_translatable, model_pattern

if TYPE_CHECKING:
    from mca_lib.models.config import McaModelConfig


def check_latent_attention(config: "McaModelConfig") -> None:
    """Every head has a key and a value of its own; and of the scalings Megatron's latent attention has not all."""
    if config.num_query_groups != config.num_attention_heads:
        raise ModelError(
            f"model config: num_query_groups={config.num_query_groups} (num_key_value_heads) must be "
            f"num_attention_heads={config.num_attention_heads} with latent attention"
        )
    rope = config.rope_scaling
    if rope is None:
        return
    supported = "latent attention has yarn, with truncate true, alone"
    if not isinstance(rope, YarnRope):
        raise ModelError(f"model config: rope_scaling: {type(rope).__name__} is not supported; {supported}")
    if not rope.truncate:
        raise ModelError(f"model config: rope_scaling: truncate=False is not supported; {supported}")
    if rope.factor <= 1 and rope.attention_factor not in (None, 1):
        raise ModelError(
            f"model config: rope_scaling: attention_factor={rope.attention_factor} with factor={rope.factor} is "
            "not supported: latent attention has no attention factor where the factor is not greater than 1"
        )


def check_linear_attention(config: "McaModelConfig") -> None:
    """The layers are some of the model's, and the other attention is not latent."""
    net = config.gated_delta_net
    if config.latent_attention is not None and (net is not None or config.attention_output_gate):
        raise ModelError("model config: latent attention goes without gated_delta_net and attention_output_gate")
    if net is not None and list(net.layers) != sorted({*net.layers} & {*range(config.num_layers)}):
        raise ModelError(
            f"model config: gated_delta_net: layers={list(net.layers)!s:.80} must be numbers from 0 to "
            f"{config.num_layers - 1}, each once and in order"
        )


def check_norms(config: "McaModelConfig") -> None:
    """A norm over all heads is in place of one over each, and its weight is not centred at zero."""
    if config.qk_norm_over_heads and (config.zero_centered_norms or config.qk_layernorm):
        raise ModelError("model config: qk_norm_over_heads goes without qk_layernorm and zero_centered_norms")


def check_biased_experts(config: "McaModelConfig") -> None:
    """Megatron has one switch for the biases of experts and routers, and of every other linear layer."""
    moe = config.moe
    if moe is None or not moe.bias:
        return
    if not (config.qkv_bias and config.attention_output_bias) or config.dense_layers or moe.has_shared:
        raise ModelError(
            "model config: moe.bias goes with qkv_bias and attention_output_bias, with experts in every layer, and "
            "without a shared expert"
        )


def check_rotary(config: "McaModelConfig") -> None:
    """Channels rotate in pairs, and those that do are in the head. A factor of cos and sin is that of all layers."""
    channels, head = config.rotary_channels, config.kv_channels
    if config.sliding_rotary_base is not None and not isinstance(config.rope_scaling, LinearRope | Llama3Rope | None):
        raise ModelError(
            f"model config: rope_scaling: {type(config.rope_scaling).__name__} is not supported where layers with a "
            "window have a rope of their own; use linear or llama3"
        )
    if channels is None and head % 2:
        raise ModelError(f"model config: head size kv_channels={head} (head_dim) is odd; channels rotate in pairs")
    if channels is not None and (channels % 2 or not 0 < channels < head):
        raise ModelError(
            f"model config: rotary_channels={channels} (partial_rotary_factor) must be even, and less than the head "
            f"size {head}; channels rotate in pairs"
        )
    if isinstance(rope := config.rope_scaling, LongRope):
        for name in ("short_factor", "long_factor"):
            if (found := len(getattr(rope, name))) != config.rotating_channels // 2:
                raise ModelError(
                    f"model config: rope_scaling: {name} has {found} factors, and {config.rotating_channels} channels "
                    f"of a head rotate: it must have {config.rotating_channels // 2}"
                )


_NOT_IN_HYBRIDS: dict[str, tuple[object, str]] = {
    "vision": (None, "a vision tower"),
    "zero_centered_norms": (False, "zero-centred norms"),
    "gated_delta_net": (None, "layers with a gated delta net"),
    "attention_output_gate": (False, "a gate on the output of attention"),
    "pre_norms": (True, "layers without a norm on their input"),
    "post_norms": (False, "norms on the output of attention and MLP"),
    "qk_norm_over_heads": (False, "a norm over all heads of queries and keys"),
    "sliding_rotary_base": (None, "a second rope, for layers with a window"),
    "query_pre_attn_scalar": (None, "scores that are scaled by another number than the head size"),
    "embedding_multiplier": (1.0, "embeddings that are scaled"),
    "attention_sinks": (False, "attention sinks"),
    "activation_clamp": (None, "clamped activations"),
    "glu_linear_offset": (0.0, "an offset beside its gates"),
}
"""Field → (its neutral value, what another value means)."""

_NOT_IN_EXPORTED_CODE: dict[str, tuple[object, str]] = {
    "residual_dropout": (0.0, "dropout on what attention and MLP add to the residual (residual_dropout, resid_pdrop)"),
    "rotary_channels": (None, "heads of which only a part rotates (partial_rotary_factor)"),
}
"""The same, of what Megatron's hybrids have and the code of exported ones (`mcaflow_hybrid`) does not."""


def _foreign_to_hybrids(config: "McaModelConfig") -> str | None:
    """What of the model the layers of a hybrid do not have."""
    return _foreign(config, _NOT_IN_HYBRIDS)


def foreign_to_exported_code(config: "McaModelConfig") -> str | None:
    """What of the model the code of exported hybrids does not have, in plain words."""
    return _foreign(config, _NOT_IN_EXPORTED_CODE)


def _foreign(config: "McaModelConfig", table: dict[str, tuple[object, str]]) -> str | None:
    return next((words for name, (neutral, words) in table.items() if getattr(config, name) != neutral), None)


def check_hybrid(config: "McaModelConfig", hybrid: HybridLayers) -> None:
    """The layers of the pattern are those that the config numbers."""
    try:
        model_pattern(hybrid.pattern, "model config: hybrid.pattern")
    except ConfigError as error:
        raise ModelError(str(error)) from None
    if len(hybrid.pattern) != config.num_layers:
        raise ModelError(f"model config: num_layers={config.num_layers}, and hybrid.pattern={hybrid.pattern!r}")
    if config.moe_layers != tuple(i for i, symbol in enumerate(hybrid.pattern) if symbol == MOE):
        raise ModelError(f"model config: moe.layers={config.moe_layers} are not the E of {hybrid.pattern!r}")
    if config.mtp_num_layers:
        raise ModelError("model config: a hybrid has no multi-token prediction (mtp_num_layers)")
    if isinstance(config.rope_scaling, LongRope):
        raise ModelError("model config: a hybrid has no LongRoPE (rope_scaling)")
    if (foreign := _foreign_to_hybrids(config)) is not None:
        raise ModelError(f"model config: the layers of a hybrid have no {foreign}")


def checked_layers(config: "McaModelConfig", hybrid: HybridLayers, field: str) -> LayerMap:
    """Where a hybrid has the layers of the transformer `config`. Raises ConfigError, naming `field`, if it cannot."""
    if not isinstance(hybrid, HybridLayers):
        raise ConfigError(f"{field}: needs a HybridLayers, found {hybrid!r:.80}")
    if config.hybrid is not None:
        raise ConfigError(f"{field}: the model is a hybrid already, of pattern {config.hybrid.pattern!r}")
    if config.mtp_num_layers:
        raise ConfigError(f"{field}: a transformer with multi-token prediction cannot become a hybrid")
    if isinstance(config.rope_scaling, LongRope):
        raise ConfigError(f"{field}: a transformer with LongRoPE cannot become a hybrid")
    if config.latent_attention is not None:
        raise ConfigError(f"{field}: a transformer with latent attention (MLA) cannot become a hybrid")
    if (foreign := _foreign_to_hybrids(config)) is not None:
        raise ConfigError(f"{field}: {config.described} cannot become a hybrid: it has {foreign}")
    if config.moe is not None and len(config.moe.layers) != config.num_layers:
        raise ConfigError(f"{field}: a transformer with dense and MoE layers cannot become a hybrid; all must be alike")
    pattern = model_pattern(hybrid.pattern, field)
    return check_translatable(pattern, config.num_layers, has_experts=config.moe is not None, field=field)
