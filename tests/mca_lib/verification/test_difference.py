"""The measure itself: exact where the answer is known, and blind to nothing."""

import math

import pytest
import torch

from mca_lib.verification.card import Limits
from mca_lib.verification.difference import Measured, Sums, difference

ROWS, LENGTH, VOCABULARY = 2, 3, 5
ALL = torch.ones(ROWS, LENGTH, dtype=torch.bool)


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def test_equal_logits_are_no_distance_apart() -> None:
    everything, with_loss = difference(logits(), logits(), ALL)
    assert everything.measured() == Measured(ROWS * LENGTH, 0.0, 0.0, 1.0)
    assert with_loss == everything


def test_kl_is_that_of_the_definition() -> None:
    reference, other = logits(0), logits(1)
    p, q = reference.double().softmax(-1), other.double().softmax(-1)
    expected = (p * (p / q).log()).sum(-1).mean().item()
    assert difference(reference, other, ALL)[0].measured().kl == pytest.approx(expected, rel=1e-12)


def test_kl_of_rounding_is_not_lost_in_rounding() -> None:
    """KL ≈ variance of Δ / 2 for small Δ; in fp32 its own rounding would be 1e-8."""
    reference = logits()
    kl = difference(reference, reference + 1e-5 * logits(1), ALL)[0].measured().kl
    assert 1e-12 < kl < 1e-9


def test_loss_tokens_are_counted_apart() -> None:
    reference, other = logits(), logits()
    other[0, 1, 2] += 1.0
    mask = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    mask[1, 2] = True
    everything, with_loss = difference(reference, other, mask)
    assert everything.max_difference == pytest.approx(1.0)
    assert with_loss.measured() == Measured(1, 0.0, 0.0, 1.0)


def test_parts_of_ranks_add_up() -> None:
    reference, other = logits(0), logits(1)
    whole = difference(reference, other, ALL)[0].measured()
    parts = [difference(reference[:, s], other[:, s], ALL[:, s])[0] for s in (slice(0, 1), slice(1, 3))]
    assert sum(parts, Sums()).measured().kl == pytest.approx(whole.kl)
    assert sum(parts, Sums()).measured().max_difference == whole.max_difference


@pytest.mark.parametrize("row", [0, 1])
def test_nan_exceeds_every_limit(row: int) -> None:
    broken = logits()
    broken[row, 0, 0] = math.nan
    for pair in ((logits(), broken), (broken, logits())):
        assert Limits().exceeded(difference(*pair, ALL)[0].measured())
