"""How far apart the logits of two models are, over all tokens and over those that carry loss.

Sums and maxima, so that the parts that ranks hold add up. KL is computed in float64 from fp32 logits: in fp32 its own
rounding (about 1e-8) would hide what is measured.

R rows, S tokens of a row, V vocabulary.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Measured:
    """Over a set of tokens."""

    tokens: int
    max_difference: float
    """Largest |Δ| of a logit."""
    kl: float
    """Mean of KL(transformers ‖ Megatron-Core), in nats."""
    top1: float
    """Share of the tokens whose most likely next token is the same."""


@dataclass(frozen=True)
class Sums:
    """What adds up to a `Measured`."""

    tokens: int = 0
    max_difference: float = 0.0
    kl: float = 0.0
    same: int = 0

    def __add__(self, other: Self) -> Self:
        largest = [self.max_difference, other.max_difference]
        return Sums(
            self.tokens + other.tokens,
            math.nan if any(map(math.isnan, largest)) else max(largest),
            self.kl + other.kl,
            self.same + other.same,
        )

    def measured(self, copies: int = 1) -> Measured:
        """Args:
        copies: how many ranks have seen each token.
        """
        n = max(self.tokens, 1)
        return Measured(self.tokens // copies, self.max_difference, self.kl / n, self.same / n)


@dataclass(frozen=True)
class RoundTrip:
    """What became of a model's tensors on the way there and back."""

    tensors: int
    """Of the source."""
    different: tuple[str, ...]
    """Names that are missing, added, or of other bytes, shape or dtype."""


@dataclass(frozen=True)
class RankReport:
    """Of one rank at one layout."""

    everything: Sums
    with_loss: Sums
    round_trip: RoundTrip | None
    """From rank 0."""


def difference(
    reference_RSV: Iterable["torch.Tensor"], logits_RSV: "torch.Tensor", loss_RS: "torch.Tensor"
) -> tuple[Sums, Sums]:
    """(all tokens, loss tokens) of fp32 logits; NaN in either stays NaN. Works row by row: float64 needs the room."""
    everything, with_loss = Sums(), Sums()
    for reference_SV, logits_SV, loss_S in zip(reference_RSV, logits_RSV, loss_RS, strict=True):
        delta_S = (logits_SV - reference_SV).abs().amax(-1)
        p_log_SV, q_log_SV = (t.double().log_softmax(-1) for t in (reference_SV, logits_SV))
        kl_S = (p_log_SV.exp() * (p_log_SV - q_log_SV)).sum(-1)
        same_S = reference_SV.argmax(-1) == logits_SV.argmax(-1)
        everything += _sums(delta_S, kl_S, same_S)
        if loss_S.any():
            with_loss += _sums(*(t[loss_S] for t in (delta_S, kl_S, same_S)))
        del p_log_SV, q_log_SV
    return everything, with_loss


def _sums(delta_S: "torch.Tensor", kl_S: "torch.Tensor", same_S: "torch.Tensor") -> Sums:
    return Sums(delta_S.numel(), delta_S.max().item(), kl_S.sum().item(), int(same_S.sum()))
