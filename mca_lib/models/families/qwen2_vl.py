"""Qwen2-VL: Qwen2 with rotary positions of three axes, and a tower of patches in the size of the image."""

from mca_lib.models.families import qwen2
from mca_lib.models.families.base import Field, HfConfig, Neutral
from mca_lib.models.families.dense import DENSE_NEUTRAL, head_size, key_value_heads, replaced
from mca_lib.models.families.vision import VisionFamily, under_language_model
from mca_lib.models.families.window import SwitchedWindow


def _says_nothing(hf: HfConfig) -> bool:
    return hf["head_dim"] == head_size(hf)


FAMILY = VisionFamily(
    model_type="qwen2_vl",
    architecture="Qwen2VLForConditionalGeneration",
    fields=replaced(
        tuple(field for field in qwen2.FAMILY.fields if field.hf != "head_dim"),
        Field("rms_norm_eps", "norm_epsilon", 1e-5),
        key_value_heads(8),
    ),
    derived={"kv_channels": head_size},
    weights=under_language_model(qwen2.FAMILY.weights),
    # transformers has no field for it here: its attention takes this size, and its rope another one if it is given.
    neutral=(*DENSE_NEUTRAL, Neutral("head_dim", (), unless=_says_nothing)),
    window=SwitchedWindow(default_max_window_layers=80),
    rope_base=1000000.0,
    fixed={"qkv_bias": True},
    mrope_section=(16, 24, 24),
)
