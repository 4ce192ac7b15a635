"""Qwen2.5-VL: Qwen2-VL with a tower of RMSNorms, gated MLPs and attention within windows of an image."""

from dataclasses import replace

from mca_lib.models.families import qwen2_vl

FAMILY = replace(qwen2_vl.FAMILY, model_type="qwen2_5_vl", architecture="Qwen2_5_VLForConditionalGeneration")
