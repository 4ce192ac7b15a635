"""Qwen3-VL, dense: Qwen3 with interleaved rotary positions of three axes, and features of the image after its first
layers too."""

from mca_lib.models.families import qwen3
from mca_lib.models.families.base import Field
from mca_lib.models.families.dense import key_value_heads, replaced
from mca_lib.models.families.vision import VisionFamily, under_language_model

FAMILY = VisionFamily(
    model_type="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    fields=replaced(
        qwen3.FAMILY.fields,
        Field("max_position_embeddings", "max_position_embeddings", 128000),
        key_value_heads(32),
    ),
    weights=under_language_model(qwen3.FAMILY.weights),
    neutral=qwen3.FAMILY.neutral,
    rope_base=500000.0,
    fixed=qwen3.FAMILY.fixed,
    mrope_section=(24, 20, 20),
    mrope_interleaved=True,
    may_be_flat=False,
)
