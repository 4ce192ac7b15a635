"""Which model a run trains: that of its directory, or the hybrid that its arguments make of it. No torch."""

from mca_lib.errors import ConfigError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.hybrid.pattern import parse_pattern


def run_config(config: McaModelConfig, args: object | None) -> McaModelConfig:
    """Config of the model that the run trains.

    Args:
        config: of the model directory.
        args: training arguments; those without the arguments of hybrids change nothing.

    Raises ConfigError where the transformer cannot become the hybrid that they ask for, or a hybrid would be another.
    """
    if config.hybrid is not None and getattr(args, "use_legacy_model", False):
        raise ConfigError(
            f"use_legacy_model=True, and the model is a hybrid of pattern {config.hybrid.pattern!r}: give a "
            "transformer, or leave it out"
        )
    text = getattr(args, "hybrid_layer_pattern", None)
    if config.hybrid is not None and text is not None and parse_pattern(text).layers == config.hybrid.pattern:
        args.check_unchanged(config.hybrid)  # the sizes of its Mamba layers are its own, whatever would be derived
        return config
    make_hybrid = getattr(args, "hybrid_layers", None)
    hybrid = make_hybrid(config.hidden_size) if make_hybrid is not None else None
    return config if hybrid is None else config.with_hybrid(hybrid)
