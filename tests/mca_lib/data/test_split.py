"""Random choices depend on the seed and the content, and never leak a held-out row."""

import numpy as np
import pytest

from mca_lib.data.split import hold_out, permutation
from mca_lib.errors import DataError


def digests(*contents):
    return [str(content).encode() for content in contents]


def held_out_of(contents, fraction, seed):
    return hold_out(contents, contents, fraction, seed)


def test_a_permutation_is_fixed_for_ever():
    """Golden values: a change of them silently reshuffles every data set."""
    assert permutation(8, 42, "documents").tolist() == [3, 5, 7, 6, 1, 0, 2, 4]


def test_permutations_depend_on_seed_and_purpose_alone():
    base = permutation(1000, 1, "packs")
    assert sorted(base.tolist()) == list(range(1000))
    assert base.tolist() == permutation(1000, 1, "packs").tolist()
    assert base.tolist() != permutation(1000, 2, "packs").tolist()
    assert base.tolist() != permutation(1000, 1, "max_rows").tolist()


@pytest.mark.parametrize(
    ("n", "fraction", "expected"), [(100, 0.1, 10), (10, 0.001, 1), (2, 0.9, 1), (1, 0.5, 0), (50, 0, 0)]
)
def test_the_share_that_is_held_out(n, fraction, expected):
    assert held_out_of(digests(*range(n)), fraction, seed=3).sum() == expected


@pytest.mark.parametrize("seed", range(20))
def test_equal_rows_are_never_on_two_sides(seed):
    contents = np.random.default_rng(seed).integers(0, 12, size=60)
    held_out = held_out_of(digests(*contents), 0.2, seed)
    train, evaluation = set(contents[~held_out]), set(contents[held_out])
    assert train
    assert evaluation
    assert not train & evaluation


def test_a_row_that_is_most_of_the_data_stays_in_training():
    held_out = held_out_of(digests(*["same"] * 98, "a", "b"), 0.01, seed=0)
    assert held_out.sum() == 1
    assert not held_out[:98].any()


def test_the_smallest_group_is_held_out_when_all_are_too_big():
    held_out = held_out_of(digests(*["a"] * 6, *["b"] * 4), 0.1, seed=0)
    assert held_out.tolist() == [False] * 6 + [True] * 4


def test_rows_that_are_all_equal_cannot_be_held_out():
    with pytest.raises(DataError, match=r"all 3 rows are equal.*dataset\.eval_fraction"):
        held_out_of(digests("x", "x", "x"), 0.1, seed=0)


def test_changing_one_row_moves_hardly_any_other():
    rows = digests(*range(1000))
    before = held_out_of(rows, 0.1, seed=0)
    rows[500] = b"changed"
    after = held_out_of(rows, 0.1, seed=0)
    assert (before != after).sum() <= 2


def test_the_same_rows_are_held_out_when_their_tokens_change():
    """As by another template or cutoff."""
    contents = digests(*range(100))
    tokens = [b"other " + content for content in contents]
    assert hold_out(tokens, contents, 0.1, seed=5).tolist() == held_out_of(contents, 0.1, seed=5).tolist()
