"""Rows that cannot be trained on are refused by their number."""

import dataclasses

import numpy as np
import pytest

from mca_lib.data.token_store import TokenStore, TokenStoreWriter
from mca_lib.errors import DataError
from mca_lib.models.registry import config_from_hf
from mca_lib.trainers.row_checks import check_loss, check_rows
from tests.mca_lib.models.test_registry import BASE

CONFIG = dataclasses.replace(config_from_hf(BASE), vocab_size=50, max_position_embeddings=8)


def store(path, *rows: list[list[int]], mask: bool = True) -> TokenStore:
    with TokenStoreWriter(path) as writer:
        for row in rows:
            writer.add_row([(tokens, [mask] * len(tokens)) for tokens in row])
    return TokenStore.open(path)


def test_rows_that_fit_pass(tmp_path):
    check_rows(store(tmp_path, [[1, 49], [2] * 8], [[3, 4]]), CONFIG)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [[[1, 2]], [[3], [4] * 9], [[5] * 11]],
            r"row 1 \(and 1 more\) has a document of more tokens .* 8 pos.* 11",
        ),
        ([[[1, 2]], [[3, 4], [7, 50]]], "row 1 has token 50, and the model has 50; tokenize with the model's own"),
        ([[[1, -2]]], "row 0 has token -2"),
    ],
)
def test_rows_that_do_not_fit_the_model_are_refused(tmp_path, rows, said):
    with pytest.raises(DataError, match=said):
        check_rows(store(tmp_path, *rows), CONFIG)


def test_rows_without_tokens_are_refused(tmp_path):
    store(tmp_path, [[1, 2]], [[3]])
    for name, offsets, said in (
        ("row_offsets", [0, 2, 2], "row 1 is empty"),
        ("document_offsets", [0, 3, 3], "row 1 has an empty document"),
    ):
        before = np.load(tmp_path / f"{name}.npy")
        np.save(tmp_path / f"{name}.npy", np.array(offsets, dtype=np.int64))
        with pytest.raises(DataError, match=said):
            check_rows(TokenStore.open(tmp_path), CONFIG)
        np.save(tmp_path / f"{name}.npy", before)


def test_rows_without_any_loss_are_refused(tmp_path):
    check_loss(store(tmp_path / "one", [[1, 2]]), "train on")
    with pytest.raises(DataError, match="no token has loss, there is nothing to train on"):
        check_loss(store(tmp_path / "none", [[1, 2]], mask=False), "train on")
