"""`AutoConfig` and `AutoModel`: the right class for a directory, whichever model and format it holds."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mca_lib.models.config import McaModelConfig
from mca_lib.models.hybrid.run_config import run_config
from mca_lib.models.model_factory import VirtualModels

if TYPE_CHECKING:
    from mca_lib.models.language_model import McaLanguageModel


class AutoConfig:
    """Config of an MCA checkpoint directory or of a Hugging Face one."""

    @staticmethod
    def from_pretrained(directory: str | Path) -> McaModelConfig:
        """Raises ModelError for a directory that holds neither, or a model that is not supported."""
        return McaModelConfig.from_pretrained(directory)


class AutoModel:
    """Model chunks of this rank: `McaGPTModel` for every family of transformers, `McaHybridModel` for hybrids.

    The config decides what their layers are.
    """

    @staticmethod
    def from_pretrained(
        directory: str | Path,
        args: object | None = None,
        *,
        use_cpu_initialization: bool | None = None,
        tokenizer: Any | None = None,
    ) -> VirtualModels:
        """See `PretrainedModel.from_pretrained`.

        With `hybrid_layer_pattern` in `args` a transformer becomes a hybrid, unless `use_legacy_model` is set.
        """
        model_class = class_of(run_config(McaModelConfig.from_pretrained(directory), args))
        return model_class.from_pretrained(
            directory, args, use_cpu_initialization=use_cpu_initialization, tokenizer=tokenizer
        )

    @staticmethod
    def from_config(
        config: McaModelConfig, args: object | None = None, *, use_cpu_initialization: bool | None = None
    ) -> VirtualModels:
        """A model with random weights; `hybrid_layer_pattern` in `args` as for `from_pretrained`."""
        config = run_config(config, args)
        return class_of(config).from_config(config, args, use_cpu_initialization=use_cpu_initialization)


def class_of(config: McaModelConfig) -> type["McaLanguageModel"]:
    """The class of a model."""
    if config.hybrid is not None:
        from mca_lib.models.hybrid.model import McaHybridModel

        return McaHybridModel
    if config.vision is not None:
        from mca_lib.models.vision.model import McaVisionModel

        return McaVisionModel
    from mca_lib.models.gpt import McaGPTModel

    return McaGPTModel
