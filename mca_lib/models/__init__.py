"""Model configs, families and the Megatron-Core model factory. The names load on first use: importing this is light."""

import importlib

_HOME = {
    "AutoConfig": "mca_lib.models.auto",
    "AutoModel": "mca_lib.models.auto",
    "McaModelConfig": "mca_lib.models.config",
    "McaGPTModel": "mca_lib.models.gpt",
    "PretrainedModel": "mca_lib.models.model_factory",
    "VirtualModels": "mca_lib.models.model_factory",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
