"""LoRA on Megatron-Core's parallel linear layers. The names load on first use: importing this is light."""

import importlib

_HOME = {
    "apply_megatron_lora": "mca_lib.adapters.adapters",
    "find_all_linear_modules": "mca_lib.adapters.targets",
    "lora_config": "mca_lib.adapters.settings",
    "set_linear_is_expert": "mca_lib.adapters.adapters",
    "target_names": "mca_lib.adapters.targets",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
