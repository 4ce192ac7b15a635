"""Which model a run trains: that of its directory, or the hybrid that its arguments make of it. No torch."""

from mca_lib.errors import ConfigError
from mca_lib.models.config import McaModelConfig


def run_config(config: McaModelConfig, args: object | None) -> McaModelConfig:
    """Config of the model that the run trains.

    Args:
        config: of the model directory.
        args: training arguments; those without the arguments of hybrids change nothing.

    Raises ConfigError where the transformer cannot become the hybrid that they ask for.
    """
    make_hybrid = getattr(args, "hybrid_layers", None)
    if config.hybrid is not None and getattr(args, "use_legacy_model", False):
        raise ConfigError(
            f"use_legacy_model=True, and the model is a hybrid of pattern {config.hybrid.pattern!r}: give a "
            "transformer, or leave it out"
        )
    hybrid = make_hybrid(config.hidden_size) if make_hybrid is not None else None
    if hybrid is None:
        return config
    # The sizes of a hybrid's Mamba layers are its own.
    if config.hybrid is not None and config.hybrid.pattern == hybrid.pattern:
        return config
    return config.with_hybrid(hybrid)
