"""Inverse frequencies of the rotary embedding, with Llama 3's scaling under the source's own factors.

Megatron's `rope_scaling` takes the factor alone and fixes the other three to Llama 3.1's values.
Source of the formula: transformers, `modeling_rope_utils._compute_llama3_parameters`.
"""

import math

import torch

from mca_lib.models.config import Llama3Rope


def scale_inverse_frequencies(inv_freq_D: torch.Tensor, rope: Llama3Rope) -> torch.Tensor:
    """Slow the long waves by `factor`, keep the short ones, and blend between; D: half the head size."""
    context = rope.original_max_position_embeddings
    wavelength_D = 2 * math.pi / inv_freq_D
    longest, shortest = context / rope.low_freq_factor, context / rope.high_freq_factor
    share_D = (context / wavelength_D - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended_D = (1 - share_D) * inv_freq_D / rope.factor + share_D * inv_freq_D
    scaled_D = torch.where(wavelength_D > longest, inv_freq_D / rope.factor, blended_D)
    return torch.where(wavelength_D < shortest, inv_freq_D, scaled_D)
