"""Model configs, families and the Megatron-Core model factory. The names load on first use: importing this is light."""

from mca_lib.lazy import loader

_HOME = {
    "AutoConfig": "mca_lib.models.auto",
    "AutoModel": "mca_lib.models.auto",
    "McaModelConfig": "mca_lib.models.config",
    "McaGPTModel": "mca_lib.models.gpt",
    "PretrainedModel": "mca_lib.models.model_factory",
    "VirtualModels": "mca_lib.models.model_factory",
}
__all__ = sorted(_HOME)
__getattr__ = loader(__name__, _HOME)
