"""Body of ``mcaflow hybrid-pattern``: the pattern of a hybrid that starts from a transformer."""

from pathlib import Path

from flows.recipe import read_recipe
from mca_lib.errors import ConfigError, ModelError
from mca_lib.models.config import McaModelConfig, read_json
from mca_lib.models.hybrid.pattern import interpolated
from mca_lib.models.hybrid.sizes import hybrid_layers
from mca_lib.models.registry import config_from_hf


def print_pattern(layers: int | None, model: Path | None, *, mamba_every: int, moe: bool) -> None:
    """Print it alone, as a shell's $(…) wants it."""
    print(pattern_for(layers, model, mamba_every=mamba_every, moe=moe))


def pattern_for(layers: int | None, model: Path | None, *, mamba_every: int, moe: bool = False) -> str:
    """The pattern for so many layers, or for a model that is named by its directory, config.json, or recipe.

    Raises:
        ConfigError: neither or both are given, sizes that are none, a model that cannot become a hybrid.
        ModelError: there is no such model.
    """
    if (layers is None) == (model is None):
        raise ConfigError("give one of --layers and --model" + ("" if layers is None else ", not both"))
    if mamba_every < 0:
        raise ConfigError(f"--mamba-every {mamba_every}: must be at least 0")
    if model is None:
        if layers < 1:
            raise ConfigError(f"--layers {layers}: must be at least 1")
        return interpolated(layers, mamba_every, has_experts=moe)
    config = _model_config(model)
    if moe and config.moe is None:
        raise ConfigError(f"--moe: {model} has no experts; leave it out")
    pattern = interpolated(config.num_layers, mamba_every, has_experts=config.moe is not None)
    # The sizes only have to be some: with those of a recipe, `mcaflow check` looks at both.
    some = {"num_heads": 1, "head_dim": 1}
    config.with_hybrid(hybrid_layers(pattern, config.hidden_size, some), str(model))
    return pattern


def _model_config(model: Path) -> McaModelConfig:
    if model.suffix in (".yaml", ".yml"):
        # Its model alone: the recipe lacks the pattern still, and may lack more.
        section = read_recipe(model).get("model")
        name = section.get("name_or_path") if isinstance(section, dict) else None
        if not isinstance(name, str):
            raise ConfigError(f"recipe {model}: model.name_or_path: field required")
        model = Path(name).expanduser()
        if not model.is_dir():
            raise ModelError(f"model.name_or_path: {name} is not a directory here; give --layers")
    if model.is_file():
        return config_from_hf(read_json(model, ModelError))
    return McaModelConfig.from_pretrained(model)
