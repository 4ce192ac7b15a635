"""Claims about the token store's format and its rows."""

import pickle

import numpy as np
import pytest

from mca_lib.data.token_store import ARRAYS, IGNORE_INDEX, TokenStore, TokenStoreWriter
from mca_lib.errors import DataError


def random_rows(seed, rows=30):
    """Rows of 1 to 4 documents of 1 to 40 tokens with a random mask."""
    rng = np.random.default_rng(seed)
    return [
        [(rng.integers(0, 50_000, n), rng.random(n) < 0.4) for n in rng.integers(1, 41, rng.integers(1, 5))]
        for _ in range(rows)
    ]


def write(path, rows):
    with TokenStoreWriter(path) as writer:
        for row in rows:
            writer.add_row(row)
    return TokenStore.open(path)


def test_rows_come_back_as_written(tmp_path):
    rows = random_rows(1)
    store = write(tmp_path / "train", rows)
    assert len(store) == len(rows)
    for row, documents in zip(store, rows, strict=True):
        np.testing.assert_array_equal(row.input_ids, np.concatenate([tokens for tokens, _ in documents]))
        np.testing.assert_array_equal(row.document_lengths, [len(tokens) for tokens, _ in documents])
        assert {a.dtype for a in (row.input_ids, row.labels, row.position_ids, row.document_lengths)} == {
            np.dtype("i8")
        }


def test_a_label_is_the_next_token_of_the_same_document_where_the_mask_is_set(tmp_path):
    rows = random_rows(2)
    for row, documents in zip(write(tmp_path / "train", rows), rows, strict=True):
        expected, positions = [], []
        for tokens, mask in documents:
            expected += [int(t) if m else IGNORE_INDEX for t, m in zip(tokens[1:], mask[1:], strict=True)]
            expected.append(IGNORE_INDEX)
            positions += range(len(tokens))
        assert row.labels.tolist() == expected
        assert row.position_ids.tolist() == positions


def test_no_label_crosses_from_one_document_to_the_next(tmp_path):
    row = write(tmp_path / "train", [[([1, 2], [True, True]), ([3, 4], [True, True])]])[0]
    assert row.labels.tolist() == [2, IGNORE_INDEX, 4, IGNORE_INDEX]


def test_counts_agree_with_the_rows(tmp_path):
    store = write(tmp_path / "train", random_rows(3))
    rows = list(store)
    assert store.num_tokens == sum(len(r.input_ids) for r in rows)
    assert store.num_loss_tokens == sum(int((r.labels != IGNORE_INDEX).sum()) for r in rows)
    assert store.num_documents == sum(len(r.document_lengths) for r in rows)
    assert store.row_lengths.tolist() == [len(r.input_ids) for r in rows]
    assert store[-1].input_ids.tolist() == rows[-1].input_ids.tolist()
    with pytest.raises(IndexError):
        store[len(rows)]


def test_a_token_costs_about_four_bytes(tmp_path):
    rng = np.random.default_rng(0)
    documents = [(rng.integers(0, 1000, 400), np.ones(400, dtype=bool)) for _ in range(200)]
    store = write(tmp_path / "train", [[d] for d in documents])
    size = sum((tmp_path / "train" / f"{name}.npy").stat().st_size for name in ARRAYS)
    assert size / store.num_tokens < 4.2


def test_documents_of_a_row_may_lie_anywhere(tmp_path):
    store = write(tmp_path / "train", [[([1, 2], [0, 1])], [([3], [0])], [([4, 5, 6], [0, 1, 1])]])
    np.save(tmp_path / "train" / "row_documents.npy", np.array([2, 0, 1]))
    np.save(tmp_path / "train" / "row_offsets.npy", np.array([0, 2, 3]))
    row = TokenStore.open(tmp_path / "train")[0]
    assert row.input_ids.tolist() == [4, 5, 6, 1, 2]
    assert row.labels.tolist() == [5, 6, IGNORE_INDEX, 2, IGNORE_INDEX]
    assert row.document_lengths.tolist() == [3, 2]
    assert len(store) == 3


def test_pickling_sends_the_path_and_not_the_tokens(tmp_path):
    store = write(tmp_path / "train", random_rows(4, rows=400))
    assert len(pickle.dumps(store)) < 1000
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(store))[7].labels, store[7].labels)


def test_equal_rows_make_equal_files(tmp_path):
    write(tmp_path / "a", random_rows(5))
    write(tmp_path / "b", random_rows(5))
    for name in ARRAYS:
        assert (tmp_path / "a" / f"{name}.npy").read_bytes() == (tmp_path / "b" / f"{name}.npy").read_bytes()


@pytest.mark.parametrize("damage", ["missing", "truncated", "of another store"])
def test_a_damaged_store_is_refused_by_name(tmp_path, damage):
    write(tmp_path / "train", random_rows(6))
    tokens = tmp_path / "train" / "tokens.npy"
    if damage == "missing":
        tokens.unlink()
    elif damage == "truncated":
        tokens.write_bytes(tokens.read_bytes()[:-8])
    else:
        write(tmp_path / "other", random_rows(7))
        tokens.write_bytes((tmp_path / "other" / "tokens.npy").read_bytes())
    with pytest.raises(DataError, match=str(tmp_path / "train")):
        TokenStore.open(tmp_path / "train")


def test_an_interrupted_writer_leaves_nothing_that_opens(tmp_path):
    def interrupted():
        with TokenStoreWriter(tmp_path / "train") as writer:
            writer.add_row([([1, 2], [False, True])])
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    with pytest.raises(DataError):
        TokenStore.open(tmp_path / "train")


@pytest.mark.parametrize("documents", [[], [([], [])], [([1, 2], [True])]])
def test_rows_without_tokens_or_of_unequal_lengths_are_refused(tmp_path, documents):
    writer = TokenStoreWriter(tmp_path / "train")
    with pytest.raises(ValueError, match="needs"):
        writer.add_row(documents)
