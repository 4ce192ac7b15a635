"""How far from transformers a model may be. No torch."""

from dataclasses import dataclass
from typing import Self

from mca_lib.verification.difference import Measured


@dataclass(frozen=True)
class Limits:
    """What a card must stay within."""

    max_difference: float = 1e-4
    """Largest |Δ| of an fp32 logit."""
    kl: float = 1e-9
    """Mean KL per token."""

    @classmethod
    def of_noise(cls, own: Measured, largest_logit: float) -> Self:
        """Limits for a model of any depth and scale, from how far transformers is from itself in fp32.

        Args:
            own: SDPA against eager attention.
            largest_logit: its absolute value, whose rounding is the least that a limit can be.
        """
        rounding = EPSILON * largest_logit
        return cls(
            min(CEILING.max_difference, max(NOISE_FACTOR * own.max_difference, LARGEST_ROUNDINGS * rounding)),
            min(CEILING.kl, max(NOISE_FACTOR * own.kl, (TYPICAL_ROUNDINGS * rounding) ** 2 / 2, KL_ROUNDING)),
        )

    def exceeded(self, measured: Measured) -> str | None:
        """Which limit, and by how much; None when within both. NaN exceeds."""
        if not measured.max_difference <= self.max_difference:
            return f"max |Δ| {measured.max_difference:.2g} > {self.max_difference:.2g}"
        if not measured.kl <= self.kl:
            return f"KL {measured.kl:.2g} > {self.kl:.2g}"
        return None


CEILING = Limits(max_difference=1e-2, kl=1e-6)
"""However noisy transformers itself is."""
NOISE_FACTOR = 4
"""A model may differ by so many times what transformers' two kinds of attention differ by; families have 1.1 to 2.7."""
EPSILON = 2.0**-23
"""Of fp32."""
LARGEST_ROUNDINGS, TYPICAL_ROUNDINGS = 16, 2
"""In units of the rounding of the largest logit: what the farthest of all logits may differ by, and a typical one. An
untrained model of two to six layers has 3 to 6 at the farthest. KL is half the variance of a small difference."""
KL_ROUNDING = 1e-15
"""KL is a sum in float64, which rounds too."""
