"""Speed and fill of the data path, as ratios: on one machine, against the plain way to do the same."""

import time

import numpy as np
import pytest

from mca_lib.data.packing import pack_documents
from mca_lib.data.token_store import TokenStore, TokenStoreWriter
from mca_lib.tiny_models import make_tokenizer

ROWS = 20_000


@pytest.fixture(scope="module")
def lengths():
    return np.clip(np.random.default_rng(0).lognormal(4.8, 0.8, ROWS).astype(np.int64), 2, 1024)


def seconds(function, *args):
    """Processor time, the best of three: hardly disturbed by what else the machine does."""
    times = []
    for _ in range(3):
        start = time.process_time()
        function(*args)
        times.append(time.process_time() - start)
    return min(times)


@pytest.mark.parametrize("system_text", [0, 50])
def test_20k_rows_are_packed_999_permille_full(lengths, system_text):
    """Also where no document is short, because each has a system text in front."""
    lengths = np.minimum(lengths + system_text, 1024)
    rows = pack_documents(lengths, 1024)
    assert lengths.sum() / (len(rows) * 1024) >= 0.999


@pytest.mark.parametrize("capacity", [2048, 4096, 8192])
def test_half_a_million_rows_are_packed_fuller_than_by_llamafactory_in_about_the_same_time(capacity):
    from llamafactory.data.processor.processor_utils import greedy_knapsack

    lengths = np.clip(np.random.default_rng(0).lognormal(5.6, 0.9, 500_000).astype(np.int64), 2, capacity)
    rows, took = [], []
    for pack, numbers in ((pack_documents, lengths), (greedy_knapsack, lengths.tolist())):
        start = time.process_time()
        rows.append(len(pack(numbers, capacity)))
        took.append(time.process_time() - start)
    assert lengths.sum() / (rows[0] * capacity) >= 0.9999
    assert rows[0] <= rows[1]
    assert took[0] < 2 * took[1]


def test_packing_costs_less_than_a_tenth_of_tokenizing(lengths):
    tokenizer = make_tokenizer()
    texts = ["Count the ferries, please. " * (int(length) // 6) for length in lengths[:500]]

    def tokenize():
        for text in texts:
            tokenizer.encode(text)

    assert seconds(pack_documents, lengths, 1024) / len(lengths) < 0.1 * seconds(tokenize) / len(texts)


def test_packing_grows_like_the_number_of_rows(lengths):
    """Eight times the rows: far below the 64 times of a quadratic algorithm."""
    few, many = lengths[: ROWS // 8], lengths
    assert seconds(pack_documents, many, 1024) < 24 * seconds(pack_documents, few, 1024)


def test_guarding_control_tokens_costs_little():
    from mca_lib.data.control_tokens import GuardedTokenizer

    tokenizer = make_tokenizer()
    guard = GuardedTokenizer(tokenizer)
    texts = [f"Count the ferries that leave at {i} o'clock, please. " * 8 for i in range(500)]

    def plain():
        for text in texts:
            tokenizer.encode(text, add_special_tokens=False)

    def guarded():
        for text in texts:
            guard.encode(guard.mark(text))

    assert seconds(guarded) < 2 * seconds(plain)


def test_reading_a_row_costs_no_more_than_a_few_copies_of_it(tmp_path, lengths):
    rng = np.random.default_rng(0)
    with TokenStoreWriter(tmp_path / "train") as writer:
        for row in pack_documents(lengths[:2000], 1024):
            writer.add_row([(rng.integers(0, 50_000, lengths[d]), np.ones(lengths[d], dtype=bool)) for d in row])
    store = TokenStore.open(tmp_path / "train")

    def copies():
        for row in range(len(store)):
            np.array(store.tokens_T[1024 * row : 1024 * (row + 1)], dtype=np.int64)

    assert seconds(lambda: list(store)) < 100 * seconds(copies)
