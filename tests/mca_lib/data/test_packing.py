"""Packing loses nothing, overfills nothing, and leaves hardly any room."""

import numpy as np
import pytest

from mca_lib.data.packing import pack_documents


def ordinary_lengths(n, capacity, seed=0):
    """Log-normal, as lengths of conversations are."""
    lengths = np.random.default_rng(seed).lognormal(mean=4.8, sigma=0.8, size=n).astype(np.int64)
    return np.clip(lengths, 1, capacity)


@pytest.mark.parametrize("capacity", [64, 1024])
def test_every_document_is_in_exactly_one_row_and_no_row_is_too_long(capacity):
    lengths = ordinary_lengths(3000, capacity)
    rows = pack_documents(lengths, capacity)
    assert sorted(document for row in rows for document in row) == list(range(3000))
    assert max(lengths[row].sum() for row in rows) <= capacity


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_practically_full_on_ordinary_data(seed):
    lengths = ordinary_lengths(20_000, 1024, seed)
    rows = pack_documents(lengths, 1024)
    assert lengths.sum() / (len(rows) * 1024) >= 0.999


def test_rows_are_full_where_no_document_is_short():
    """Each has a system text in front; best-fit decreasing alone leaves half a percent empty here."""
    lengths = 50 + np.minimum(ordinary_lengths(20_000, 1024), 700)
    assert lengths.sum() / (len(pack_documents(lengths, 1024)) * 1024) >= 0.999


def test_no_more_rows_than_best_fit_decreasing():
    lengths = ordinary_lengths(3000, 300, seed=4)
    rooms = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [room for room in rooms if room >= length]
        room = min(fitting) if fitting else 300
        if fitting:
            rooms.remove(room)
        rooms.append(room - length)
    assert len(pack_documents(lengths, 300)) <= len(rooms)


def test_number_of_rows_does_not_depend_on_the_order_of_documents():
    lengths = ordinary_lengths(2000, 512)
    shuffled = np.random.default_rng(1).permutation(lengths)
    assert len(pack_documents(lengths, 512)) == len(pack_documents(shuffled, 512))


def test_a_perfect_fit_is_found():
    assert len(pack_documents(np.array([6, 6, 4, 4, 3, 7]), 10)) == 3


def test_documents_of_full_length_get_rows_of_their_own():
    assert sorted(map(len, pack_documents(np.array([8, 1, 8, 2]), 8))) == [1, 1, 2]


def test_no_documents_make_no_rows():
    assert pack_documents(np.zeros(0, dtype=np.int64), 8) == []


@pytest.mark.parametrize("lengths", [[3, 9], [3, 0]])
def test_a_document_that_fits_nowhere_is_refused(lengths):
    with pytest.raises(ValueError, match=r"within 1\.\.8"):
        pack_documents(np.array(lengths), 8)
