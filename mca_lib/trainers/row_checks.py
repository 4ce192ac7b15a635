"""What of the rows cannot be trained on is said before the first step, naming the row. No torch."""

import numpy as np

from mca_lib.data.indexed_rows import IndexedRows, Rows
from mca_lib.data.token_store import TokenStore
from mca_lib.errors import DataError
from mca_lib.models.config import McaModelConfig


def check_rows(store: Rows, config: McaModelConfig) -> None:
    """Read every token once: about a second per 10⁹ of them, where the file is cached. Not those of an indexed split,
    whose largest id is known.

    Raises:
        DataError: a row is empty, has a document longer than the model's positions, or a token that the model does
            not have.
    """
    if isinstance(store, IndexedRows):
        _check_indexed(store, config)
        return
    _refuse(store, np.flatnonzero(np.diff(store.row_offsets) < 1), "is empty", "build the store again")
    _refuse(store, _rows_of(store, store.document_lengths < 1), "has an empty document", "build the store again")
    positions, longest = config.max_position_embeddings, longest_document(store)
    _refuse(
        store,
        _rows_of(store, store.document_lengths > positions),
        f"has a document of more tokens than the model's {positions} positions (the longest has {longest})",
        f"use a dataset.cutoff_len of at most {positions}",
    )
    if store.tokens_T.min() < 0 or store.tokens_T.max() >= config.vocab_size:
        place = int(np.flatnonzero((store.tokens_T < 0) | (store.tokens_T >= config.vocab_size))[0])
        document = int(np.searchsorted(store.document_offsets, place, side="right")) - 1
        _refuse(
            store,
            _rows_of(store, np.arange(store.num_documents) == document),
            f"has token {store.tokens_T[place]}, and the model has {config.vocab_size}",
            "tokenize with the model's own tokenizer",
        )


def longest_document(store: Rows) -> int:
    """Tokens that a document of a row has at most; of an indexed split those of a row."""
    return store.sequence_length if isinstance(store, IndexedRows) else int(store.document_lengths.max())


def _check_indexed(store: IndexedRows, config: McaModelConfig) -> None:
    positions, vocabulary = config.max_position_embeddings, config.vocab_size
    if store.sequence_length > positions:
        raise DataError(
            f"indexed split {store.path}: its rows have {store.sequence_length} tokens, and the model {positions} "
            f"positions; use a dataset.cutoff_len of at most {positions}"
        )
    if store.largest_id >= vocabulary:
        raise DataError(
            f"indexed split {store.path}: has token {store.largest_id}, and the model has {vocabulary}; tokenize with "
            "the model's own tokenizer"
        )


def check_loss(store: Rows, purpose: str) -> None:
    """Raise DataError when there is nothing to learn from, or to measure a loss on."""
    if store.num_loss_tokens == 0:
        raise DataError(
            f"token store {store.path}: no token has loss, there is nothing to {purpose}: look at the template and at "
            "what it masks (preview.md)"
        )


def _rows_of(store: TokenStore, chosen_D: np.ndarray) -> np.ndarray:
    """Rows that hold one of the chosen documents, in order."""
    places = np.flatnonzero(chosen_D[store.row_documents])
    return np.unique(np.searchsorted(store.row_offsets, places, side="right") - 1)


def _refuse(store: TokenStore, rows: np.ndarray, what: str, remedy: str) -> None:
    if len(rows):
        more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
        raise DataError(f"token store {store.path}: row {rows[0]}{more} {what}; {remedy}")
