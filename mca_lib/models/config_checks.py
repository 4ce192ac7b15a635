"""Fields of `McaModelConfig` that must fit each other. Each raises ModelError naming the fields. No torch."""

from typing import TYPE_CHECKING

from mca_lib.errors import ModelError
from mca_lib.models.config_parts import HybridLayers, YarnRope
from mca_lib.models.hybrid.pattern import MOE

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


def check_hybrid(config: "McaModelConfig", hybrid: HybridLayers) -> None:
    """The layers of the pattern are those that the config numbers."""
    if len(hybrid.pattern) != config.num_layers:
        raise ModelError(f"model config: num_layers={config.num_layers}, and hybrid.pattern={hybrid.pattern!r}")
    if config.moe_layers != tuple(i for i, symbol in enumerate(hybrid.pattern) if symbol == MOE):
        raise ModelError(f"model config: moe.layers={config.moe_layers} are not the E of {hybrid.pattern!r}")
    if config.mtp_num_layers:
        raise ModelError("model config: a hybrid has no multi-token prediction (mtp_num_layers)")
