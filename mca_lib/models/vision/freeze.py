"""LLaMA-Factory's switches for the parts of a vision-language model, as names of modules for `freeze`. No torch.

freeze_vision_tower            patches, positions, blocks and deepstack mergers
freeze_multi_modal_projector   the merger, which gives features of the language model's size
freeze_language_model          all of the language model, and the output layer
"""

from typing import Protocol

from mca_lib.models.config import McaModelConfig

SWITCHES = ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model")

_TOWER = ("visual.patch_embed", "visual.pos_embed", "visual.blocks", "visual.deepstack_merger_list")


class Switches(Protocol):
    """Arguments that have them."""

    freeze: list[str]
    freeze_vision_tower: bool
    freeze_multi_modal_projector: bool
    freeze_language_model: bool


def frozen_modules(config: McaModelConfig, args: Switches) -> list[str]:
    """`freeze` with the modules that the switches stand for; of a model of text as it is."""
    if config.vision is None:
        return list(args.freeze)
    tower = [name for name in _TOWER if "qwen3" in config.model_type or name in ("visual.patch_embed", "visual.blocks")]
    if not config.vision.deepstack_layers:
        tower = [name for name in tower if "deepstack" not in name]
    language = ["language_model", *([] if config.tie_word_embeddings else ["lm_head"])]
    parts = ((args.freeze_vision_tower, tower), (args.freeze_multi_modal_projector, ["visual.merger"]))
    chosen = [name for on, names in (*parts, (args.freeze_language_model, language)) if on for name in names]
    return list(dict.fromkeys([*args.freeze, *chosen]))
