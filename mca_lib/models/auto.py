"""`AutoConfig` and `AutoModel`: the right class for a directory, whichever model and format it holds."""

from pathlib import Path
from typing import Any

from mca_lib.models.config import McaModelConfig
from mca_lib.models.model_factory import VirtualModels


class AutoConfig:
    """Config of an MCA checkpoint directory or of a Hugging Face one."""

    @staticmethod
    def from_pretrained(directory: str | Path) -> McaModelConfig:
        """Raises ModelError for a directory that holds neither, or a model that is not supported."""
        return McaModelConfig.from_pretrained(directory)


class AutoModel:
    """Model chunks of this rank. Every family is one class, `McaGPTModel`; the config decides what its layers are."""

    @staticmethod
    def from_pretrained(
        directory: str | Path,
        args: object | None = None,
        *,
        use_cpu_initialization: bool | None = None,
        tokenizer: Any | None = None,
    ) -> VirtualModels:
        """See `PretrainedModel.from_pretrained`."""
        from mca_lib.models.gpt import McaGPTModel

        return McaGPTModel.from_pretrained(
            directory, args, use_cpu_initialization=use_cpu_initialization, tokenizer=tokenizer
        )

    @staticmethod
    def from_config(
        config: McaModelConfig, args: object | None = None, *, use_cpu_initialization: bool | None = None
    ) -> VirtualModels:
        """A model with random weights."""
        from mca_lib.models.gpt import McaGPTModel

        return McaGPTModel.from_config(config, args, use_cpu_initialization=use_cpu_initialization)
