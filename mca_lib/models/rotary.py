"""Inverse frequencies of the rotary embedding, for every kind of scaling, and the factor on cos and sin.

Megatron has a class per kind, and of each some fields are fixed: Llama 3's scaling takes the factor alone, YaRN's
has no attention factor. These formulas are transformers' `modeling_rope_utils`, operation by operation, so that the
values are the same bits.

D: half of the channels of a head that rotate.
"""

import math
from dataclasses import replace

import torch

from mca_lib.models.config import LinearRope, Llama3Rope, LongRope, McaModelConfig, RopeScaling, YarnRope


def model_frequencies(config: McaModelConfig) -> torch.Tensor:
    """`inverse_frequencies` of a model, [D]; where layers with a window have others, these behind them, [2·D]."""
    own = inverse_frequencies(config.rotating_channels, config.rotary_base, config.rope_scaling)
    if config.sliding_rotary_base is None:
        return own
    return torch.cat([own, inverse_frequencies(config.rotating_channels, config.sliding_rotary_base, None)])


def long_frequencies(config: McaModelConfig) -> torch.Tensor:
    """`inverse_frequencies` of a model with LongRoPE in long documents, [D]."""
    rope = replace(config.rope_scaling, short_factor=config.rope_scaling.long_factor)
    return inverse_frequencies(config.rotating_channels, config.rotary_base, rope)


def inverse_frequencies(channels: int, base: float, rope: RopeScaling | None) -> torch.Tensor:
    """Radians per position of each pair of channels, fp32 [D]; with LongRoPE those of short documents."""
    period_D = base ** (torch.arange(0, channels, 2, dtype=torch.int64).to(torch.float) / channels)
    plain_D = 1.0 / period_D
    match rope:
        case None:
            return plain_D
        case LinearRope():
            return plain_D / rope.factor
        case Llama3Rope():
            return _llama3(plain_D, rope)
        case YarnRope():
            return _yarn(period_D, base, rope)
        case LongRope():
            return 1.0 / (torch.tensor(rope.short_factor) * period_D)
    raise NotImplementedError(f"rope scaling {type(rope).__name__}")


def attention_factor(rope: RopeScaling | None) -> float:
    """Factor of cos and sin, thus by its square of the attention scores: YaRN sharpens them (equation 22)."""
    if isinstance(rope, LongRope):
        return _long_factor(rope)
    if not isinstance(rope, YarnRope):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _sharpening(rope.factor, rope.mscale) / _sharpening(rope.factor, rope.mscale_all_dim)
    return _sharpening(rope.factor)


def _long_factor(rope: LongRope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))


def _sharpening(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(plain_D: torch.Tensor, rope: Llama3Rope) -> torch.Tensor:
    """Slow the long waves by `factor`, keep the short ones, and blend between."""
    context = rope.original_max_position_embeddings
    wavelength_D = 2 * math.pi / plain_D
    longest, shortest = context / rope.low_freq_factor, context / rope.high_freq_factor
    share_D = (context / wavelength_D - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended_D = (1 - share_D) * plain_D / rope.factor + share_D * plain_D
    scaled_D = torch.where(wavelength_D > longest, plain_D / rope.factor, blended_D)
    return torch.where(wavelength_D < shortest, plain_D, scaled_D)


def _yarn(period_D: torch.Tensor, base: float, rope: YarnRope) -> torch.Tensor:
    """Slow the channels that turn less than `beta_slow` times in the original context, keep those that turn more than
    `beta_fast` times, and blend linearly between."""
    channels = 2 * len(period_D)

    def channel_of(turns: float) -> float:
        return (channels * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi))) / (
            2 * math.log(base)
        )

    low, high = channel_of(rope.beta_fast), channel_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    if low == high:
        high += 0.001  # as transformers does, against a division by zero
    kept_D = 1 - torch.clamp((torch.arange(channels // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    return 1.0 / (rope.factor * period_D) * (1 - kept_D) + 1.0 / period_D * kept_D
