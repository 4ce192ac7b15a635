"""Megatron's Mamba layer on the reference kernels: equal to transformers', packed under context parallelism, unseen."""

from typing import Any

import pytest
import torch

from mca_lib.errors import DataError
from mca_lib.models.hybrid.reference_kernels import partitioned_indices
from tests.mca_lib.models.hybrid import kernel_ranks
from tests.ranks import RankError


def test_megatrons_mixer_gives_what_transformers_gives(ranks: Any) -> None:
    found = ranks(1, kernel_ranks.mixer_and_transformers)[0]
    assert found.pop("result") < 5e-6  # fp32: roundings of numbers up to 10
    assert max(found.values()) < 5e-6, found


def test_packed_documents_do_not_depend_on_context_parallelism(ranks: Any) -> None:
    [(expected, expected_gradients)] = ranks(1, kernel_ranks.packed_mixer, 1)
    for found, gradients in ranks(2, kernel_ranks.packed_mixer, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
        for name, gradient in expected_gradients.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-5 * gradient.abs().max().item())


def test_nobody_else_sees_the_stand_ins(ranks: Any) -> None:
    found = ranks(1, kernel_ranks.stand_ins_are_gone)[0]
    assert all(found.values()), found


def test_installing_after_the_mixer_is_an_error(ranks: Any) -> None:
    with pytest.raises(RankError, match="call install_reference_kernels\\(\\) first"):
        ranks(1, kernel_ranks.install_too_late)


def test_megatron_still_needs_what_is_replaced(ranks: Any) -> None:
    for what, works in ranks(1, kernel_ranks.works_by_itself)[0].items():
        assert not works, f"Megatron can {what} without our answer now: remove it"


def test_a_rank_holds_the_positions_of_the_zigzag() -> None:
    bounds = torch.tensor([0, 8, 12], dtype=torch.int32)
    assert partitioned_indices(bounds, 16, 2, 0).tolist() == [0, 1, 6, 7, 8, 11, 12, 15]  # 12 to 15 is padding
    assert partitioned_indices(bounds, 16, 2, 1).tolist() == [2, 3, 4, 5, 9, 10, 13, 14]
    with pytest.raises(DataError, match="does not divide"):
        partitioned_indices(bounds, 14, 2, 0)
