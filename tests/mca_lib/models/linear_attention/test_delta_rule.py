"""The chunked gated delta rule against the recurrence in float64: values, gradients, packed documents."""

import pytest
import torch

from mca_lib.models.linear_attention.delta_rule import CHUNK, gated_delta_rule
from tests.mca_lib.models.linear_attention.delta_recurrence import recurrence

BATCH, HEADS, KEY, VALUE = 2, 3, 12, 20
LONG = 3 * CHUNK + 8

# Documents begin within a chunk, at its first token, twice in one, and one has a single token.
STARTS = torch.tensor([[0, 3, 60, 61, 130], [0, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 40]])

# What differs from whole rows. Without decay and with β = 1 nothing is forgotten but what is overwritten; at once
# forgotten is what a chunk's sums of logarithms must survive.
CASES = {
    "less than a chunk": {"length": 5},
    "one token": {"length": 1},
    "whole chunks": {"length": 2 * CHUNK},
    "and a rest": {"length": LONG},
    "documents": {"length": LONG, "packed": True},
    "no decay, everything overwritten": {"length": LONG, "decay": 0.0, "beta": 1.0},
    "forgotten at once": {"length": LONG, "decay": 60.0, "packed": True},
    "the same key again and again": {"length": LONG, "same_key": True},
}


def inputs(
    length: int, packed: bool = False, decay: float = 2.0, beta: float | None = None, same_key: bool = False
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    query, key = (torch.nn.functional.normalize(normal(BATCH, length, HEADS, KEY), dim=-1) for _ in range(2))
    if same_key:
        key = key[:, :1].expand_as(key).clone()
    value, sizes = normal(BATCH, length, HEADS, VALUE), (BATCH, length, HEADS)
    log_decay = -decay * uniform(*sizes) * torch.tensor([0.01, 0.3, 1.0])  # heads that remember long, and not
    rates = uniform(*sizes) if beta is None else torch.full(sizes, beta, dtype=torch.float64)
    seq_idx = (torch.arange(length) >= STARTS[..., None]).sum(1) if packed else None
    return [query, key, value, log_decay, rates], seq_idx


def with_gradients(rule: object, tensors: list[torch.Tensor], seq_idx: torch.Tensor | None) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = rule(*leaves, seq_idx=seq_idx)
    factor = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad((out * factor).sum(), leaves)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=str)
def test_values_and_gradients_are_the_recurrences(case: str, dtype: torch.dtype, limit: float) -> None:
    """Relative to the largest; fp32 is as exact as its inputs."""
    tensors, seq_idx = inputs(**CASES[case])
    tensors = [t.to(dtype) for t in tensors]
    expected = with_gradients(recurrence, [t.double() for t in tensors], seq_idx)
    for ours, theirs in zip(with_gradients(gated_delta_rule, tensors, seq_idx), expected, strict=True):
        assert ours.dtype == dtype
        assert (ours - theirs).abs().max() <= limit * theirs.abs().max().clamp(min=1e-30), case


def test_a_document_is_what_it_is_alone() -> None:
    """And no gradient reaches another; that of a decay is a difference of sums, which leave their rounding."""
    tensors, seq_idx = inputs(LONG, packed=True)
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = gated_delta_rule(*leaves, seq_idx=seq_idx)
    out[0, 3:60].sum().backward()
    for number, leaf in enumerate(leaves):
        outside = torch.cat([leaf.grad[0, :3], leaf.grad[0, 60:], leaf.grad[1]])
        assert outside.abs().max() <= (1e-13 if number == 3 else 0.0)
    alone = gated_delta_rule(*(t[:1, 3:60] for t in tensors))
    torch.testing.assert_close(out[:1, 3:60].detach(), alone, rtol=0, atol=1e-14)


def test_the_result_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, seq_idx = inputs(LONG, packed=True)
    expected = gated_delta_rule(*tensors, seq_idx=seq_idx)
    monkeypatch.setattr("mca_lib.models.linear_attention.delta_rule.CHUNK", 16)
    torch.testing.assert_close(gated_delta_rule(*tensors, seq_idx=seq_idx), expected, rtol=0, atol=1e-13)
