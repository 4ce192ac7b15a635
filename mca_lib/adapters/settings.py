"""The configuration of adapters is PEFT's own `LoraConfig`; what of it works here, and what is refused by name."""

import dataclasses
from typing import TYPE_CHECKING

from mca_lib.errors import ConfigError

if TYPE_CHECKING:
    from peft import LoraConfig

    from mca_lib.trainers.arguments import FinetuningArguments

HONOURED = frozenset({"r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules"})
"""Fields of `LoraConfig` that have their effect here."""
_HARMLESS = frozenset({"task_type", "peft_type", "peft_version", "base_model_name_or_path", "revision", "auto_mapping",
                       "inference_mode", "runtime_config"})  # fmt: skip


def lora_config(args: "FinetuningArguments") -> "LoraConfig":
    """From the arguments of a run. Raises ConfigError for values that LoRA cannot have."""
    from peft import LoraConfig

    targets = [name.strip() for name in args.lora_target.split(",") if name.strip()]
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        use_rslora=args.use_rslora,
        use_dora=args.use_dora,
        target_modules=["all-linear"] if targets == ["all"] else targets,
        task_type="CAUSAL_LM",
    )
    check_lora_config(config)
    return config


def check_lora_config(config: "LoraConfig") -> None:
    """Raise ConfigError for a value out of range, and for a field that has no effect here but is set."""
    if config.r < 1:
        raise ConfigError(f"lora.r: {config.r} is not positive")
    if config.lora_alpha <= 0:
        raise ConfigError(f"lora.alpha: {config.lora_alpha} is not positive")
    if not 0 <= config.lora_dropout < 1:
        raise ConfigError(f"lora.dropout: {config.lora_dropout} is not in [0, 1)")
    default = type(config)()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in HONOURED | _HARMLESS and value != getattr(default, field.name):
            raise ConfigError(f"lora: PEFT's {field.name}={value!r} is not supported on Megatron-Core; leave it out")


def targets_of(config: "LoraConfig") -> list[str]:
    """Its `target_modules` as a sorted list. Raises ConfigError for a regular expression."""
    targets = config.target_modules
    if isinstance(targets, str) and targets != "all-linear":
        raise ConfigError(f"lora.target_modules: {targets!r} is a regular expression to PEFT; give a list of names")
    return [targets] if isinstance(targets, str) else sorted(targets or ())


def scaling(r: int, alpha: float, use_rslora: bool) -> float:
    """Factor of B·A; rank-stabilized: https://arxiv.org/abs/2312.03732."""
    return alpha / r**0.5 if use_rslora else alpha / r
