"""Can a model be trained so? Asked before anything is allocated; the answer names the recipe's field. No torch."""

from typing import Protocol

from mca_lib.errors import ConfigError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.freeze import frozen_weights
from mca_lib.models.vision.freeze import frozen_modules

_FP8_ROWS = 16
"""What Megatron (0.19.2) wants the rows of a gated delta net's input projection to be a multiple of."""


class TrainingOptions(Protocol):
    """Fields of the recipe's section `training`, and of the training arguments."""

    moe_aux_loss_coeff: float
    moe_z_loss_coeff: float
    moe_router_bias_update_rate: float
    fp8: str | None
    freeze: list[str]
    freeze_vision_tower: bool
    freeze_multi_modal_projector: bool


def check_training_options(config: McaModelConfig, options: TrainingOptions) -> None:
    """Raises ConfigError when an option has no effect on this model, or names what it does not have."""
    frozen_weights(config, frozen_modules(config, options))
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"):
        if getattr(options, name) and config.moe is None:
            raise ConfigError(f"training.{name}={getattr(options, name)}: {config.described} has no experts; use 0")
    if options.fp8 and config.moe is not None:
        # The tokens of each expert would have to be padded to what FP8 products want, and none of it was run.
        raise ConfigError(f"training.fp8={options.fp8}: not for a model with experts; leave it out")
    net = config.gated_delta_net
    if options.fp8 and net is not None and net.input_rows % _FP8_ROWS:
        raise ConfigError(
            f"training.fp8={options.fp8}: the input projections of the model's gated delta nets have {net.input_rows} "
            f"rows, no multiple of {_FP8_ROWS}; leave it out"
        )
    if options.moe_router_bias_update_rate and not config.moe.expert_bias:
        raise ConfigError(
            f"training.moe_router_bias_update_rate={options.moe_router_bias_update_rate}: the routers of a "
            f"{config.model_type} model have no biases; use 0, or moe_aux_loss_coeff"
        )


def check_adapters_alone(config: McaModelConfig, options: TrainingOptions) -> None:
    """Raises ConfigError when options of a training with LoRA ask for parts of the model that it does not train."""
    if config.vision is None:
        return
    for name in ("freeze_vision_tower", "freeze_multi_modal_projector"):
        if not getattr(options, name):
            raise ConfigError(
                f"training.{name}=false: LoRA adapts the language model and trains nothing else; leave it out, or use "
                "finetuning_type: full"
            )
