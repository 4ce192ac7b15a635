"""RMSNorm with a gate against its formula in float64, and against transformers'."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mca_lib.models.hybrid.gated_norm import RMSNormGated
from tests.mca_lib.models.hybrid import kernel_ranks


@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("group_size", [None, 4])
@pytest.mark.parametrize("gated", [True, False])
def test_the_formula_holds(norm_before_gate: bool, group_size: int | None, gated: bool) -> None:
    x, z, weight = torch.randn(3, 2, 12).double(), torch.randn(3, 2, 12).double(), torch.randn(12).double()
    norm = RMSNormGated(12, 0.1, group_size, norm_before_gate, dtype=torch.float64)
    norm.weight.data.copy_(weight)
    gate = F.silu(z) if gated else torch.ones_like(z)
    inside = x if norm_before_gate else x * gate
    squares = torch.stack([part.square().mean(-1) for part in inside.split(group_size or 12, -1)], -1)
    root = (squares + 0.1).sqrt().repeat_interleave(group_size or 12, -1)
    expected = weight * inside / root * (gate if norm_before_gate else 1)
    torch.testing.assert_close(norm(x, z if gated else None), expected)


def test_bf16_is_computed_in_fp32() -> None:
    x, z = torch.randn(4, 8).bfloat16(), torch.randn(4, 8).bfloat16()
    norm = RMSNormGated(8, group_size=4, norm_before_gate=False, dtype=torch.bfloat16)
    exact = RMSNormGated(8, group_size=4, norm_before_gate=False)(x.float(), z.float())
    assert torch.equal(norm(x, z), exact.bfloat16())


def test_it_is_the_norm_of_transformers(ranks: Any) -> None:
    # fp32: some roundings of numbers up to 4.
    assert max(ranks(1, kernel_ranks.norm_differences)[0].values()) < 2e-6
