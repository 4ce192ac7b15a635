"""LoRA on Megatron-Core's parallel linear layers. The names load on first use: importing this is light."""

from mca_lib.lazy import loader

_HOME = {
    "apply_megatron_lora": "mca_lib.adapters.adapters",
    "find_all_linear_modules": "mca_lib.adapters.targets",
    "lora_config": "mca_lib.adapters.settings",
    "set_linear_is_expert": "mca_lib.adapters.adapters",
    "target_names": "mca_lib.adapters.targets",
}
__all__ = sorted(_HOME)
__getattr__ = loader(__name__, _HOME)
