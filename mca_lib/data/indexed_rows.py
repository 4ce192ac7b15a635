"""Training rows out of Megatron's indexed corpora: nothing is packed and nothing copied, whatever the size.

    <split>/indexed.json                what is below, and counts
    <split>/<name>.bin, <name>.idx      tokens; or these stay where the user has them
    <split>/<name>.document_index.npy   int32 [D]       documents in the order in which they are strung together
    <split>/<name>.sample_index.npy     int [R+1, 2]    (place in document_index, offset) at which row r begins
    <split>/row_corpora.npy             int16 [R]       of a blend: the corpus of each row,
    <split>/row_samples.npy             int64 [R]       and which of its rows

Both indices are Megatron-Core's own (`GPTDataset`, `BlendedDataset`), built once in the stage *dataset*; ranks only map
them. Two shuffles meet here, each made once: *documents* are put into a random order when the index is built (by
`dataset.seed`; that decides which of them share a row), *rows* by `Schedule` in every epoch (by `training.seed`).
Megatron's third, over the samples of all epochs, is not used without a blend: with it a row's step would depend on the
number of epochs. So an epoch is every row exactly once, whatever the layout and the micro batch.

A row takes `cutoff_len` tokens, and its last label is the token after them, as in Megatron (seq_length + 1 tokens). Two
rules are ours: a document's last token has no label, since what follows is another document; and what is left at a
corpus's end is a shorter row, where Megatron drops it. Borders of documents are those of the .idx, not of EOS tokens.

Shapes: S tokens of a row, N pieces of documents in it, D documents, R rows.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mca_lib.data.indexed_format import Indexed, open_indexed
from mca_lib.data.token_store import IGNORE_INDEX, Row, TokenStore
from mca_lib.errors import DataError

META = "indexed.json"

type Rows = TokenStore | IndexedRows


def open_split(path: str | Path) -> Rows:
    """The rows of a split, however they are stored. Raises DataError."""
    return IndexedRows.open(path) if (Path(path) / META).is_file() else TokenStore.open(path)


@dataclass(frozen=True)
class Corpus:
    """One corpus and Megatron's indices of it."""

    tokens: Indexed
    document_index: np.ndarray
    sample_index: np.ndarray

    def __len__(self) -> int:
        return len(self.sample_index) - 1


class IndexedRows(Sequence[Row]):
    """Read access to one split."""

    def __init__(
        self, path: Path, corpora: list[Corpus], blend: tuple[np.ndarray, np.ndarray] | None, meta: Mapping[str, Any]
    ) -> None:
        self.path, self.corpora, self._blend = path, corpora, blend
        self.sequence_length: int = meta["sequence_length"]
        self.num_tokens: int = meta["tokens"]
        """Tokens that an epoch puts through the model."""
        self.largest_id: int = meta["largest_id"]
        self.digest: str | None = None
        """Of what it holds, where the caller knows it."""
        self._first_rows = np.cumsum([0, *map(len, corpora)])

    @classmethod
    def open(cls, path: str | Path) -> "IndexedRows":
        """Map the split at `path` into memory.

        Raises:
            DataError: a file is missing or damaged.
        """
        path = Path(path)
        try:
            meta = json.loads((path / META).read_text(encoding="utf-8"))
            # A relative prefix is a file of this split.
            corpora = [read_corpus(path, name, path / prefix) for name, prefix in meta["corpora"].items()]
            blend = None
            if meta["blended"]:
                blend = (_load(path / "row_corpora.npy"), _load(path / "row_samples.npy"))
            return cls(path, corpora, blend, meta)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"indexed split {path}: cannot be read ({error}); build it again") from None

    def __reduce__(self) -> tuple:
        return IndexedRows.open, (self.path,)

    def __len__(self) -> int:
        return int(self._first_rows[-1]) if self._blend is None else len(self._blend[0])

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        """Row `index`; negative indices count from the end. Raises IndexError."""
        number, documents_N, starts_N, lengths_N = self._pieces(range(len(self))[index])
        tokens_T = self.corpora[number].tokens.tokens_T
        spans = zip(starts_N.tolist(), (starts_N + lengths_N).tolist(), strict=True)
        input_ids_S = np.concatenate([tokens_T[a:b] for a, b in spans]).astype(np.int64)
        labels_S = np.empty_like(input_ids_S)
        labels_S[:-1] = input_ids_S[1:]
        labels_S[np.cumsum(lengths_N)[:-1] - 1] = IGNORE_INDEX
        if lengths_N[-1]:  # the last document goes on: its next token is the last label
            labels_S[-1] = tokens_T[starts_N[-1] + lengths_N[-1]]
        else:  # the row ends where a document does
            documents_N, lengths_N = documents_N[:-1], lengths_N[:-1]
        first_positions_N = np.cumsum(lengths_N) - lengths_N
        position_ids_S = np.arange(len(input_ids_S), dtype=np.int64) - np.repeat(first_positions_N, lengths_N)
        before = sum(len(other.tokens.lengths_D) for other in self.corpora[:number])
        return Row(input_ids_S, labels_S, position_ids_S, lengths_N, before + documents_N)

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32 [L], loss mask bool [L]) of one document, in the order of the rows."""
        for corpus in self.corpora:
            if index < len(corpus.document_index):
                document = int(corpus.document_index[index])
                start, length = int(corpus.tokens.starts(document)), int(corpus.tokens.lengths_D[document])
                return corpus.tokens.tokens_T[start : start + length].astype(np.int32), np.arange(length) > 0
            index -= len(corpus.document_index)
        raise IndexError(index)

    @property
    def num_documents(self) -> int:
        """Documents of an epoch; of a blend, one that is drawn twice counts twice."""
        return sum(len(corpus.document_index) for corpus in self.corpora)

    @property
    def rows_of_corpora(self) -> list[int]:
        """How many rows of an epoch are of each corpus."""
        if self._blend is None:
            return [len(corpus) for corpus in self.corpora]
        return np.bincount(self._blend[0], minlength=len(self.corpora)).tolist()

    @cached_property
    def num_loss_tokens(self) -> int:
        """Labels of an epoch that are not -100: all but those of each document's last token."""
        ends = 0
        for number, corpus in enumerate(self.corpora):
            ends_R = np.diff(corpus.sample_index[:, 0])
            if self._blend is not None:
                ends_R = ends_R[self._blend[1][self._blend[0] == number]]
            ends += int(ends_R.sum(dtype=np.int64))
        return self.num_tokens - ends

    @cached_property
    def row_lengths(self) -> np.ndarray:
        """int32 [R]: tokens per row."""
        lengths_R = np.full(len(self), self.sequence_length, dtype=np.int32)
        if self._blend is None:
            for last in self._first_rows[1:] - 1:  # of each corpus, which may be shorter
                lengths_R[last] = len(self[int(last)].input_ids)
        return lengths_R

    def lengths_of(self, rows: Sequence[int]) -> np.ndarray:
        """int64 [N]: tokens of each piece of a document in these rows."""
        lengths_N = np.concatenate([self._pieces(row)[-1] for row in rows])
        return lengths_N[lengths_N > 0]

    def _pieces(self, row: int) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """(corpus, documents, where each piece of them begins in it, its length), int64 [N].

        The last piece may be empty; the token after it is the last label and the first input of the next row.
        """
        number, sample = self._locate(row)
        corpus = self.corpora[number]
        (first, offset), (last, end) = corpus.sample_index[sample : sample + 2].tolist()
        documents_N = corpus.document_index[first : last + 1].astype(np.int64)
        starts_N = corpus.tokens.starts(documents_N)
        lengths_N = corpus.tokens.lengths_D[documents_N].astype(np.int64)
        lengths_N[-1] = end
        starts_N[0] += offset
        lengths_N[0] -= offset
        return number, documents_N, starts_N, lengths_N

    def _locate(self, row: int) -> tuple[int, int]:
        """(corpus, row of that corpus) of a row."""
        if self._blend is not None:
            return int(self._blend[0][row]), int(self._blend[1][row])
        number = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        return number, row - int(self._first_rows[number])


def read_corpus(path: Path, name: str, prefix: Path) -> Corpus:
    """A corpus whose indices lie in the split `path`. Raises DataError, OSError or ValueError."""
    tokens = open_indexed(prefix)
    indices = [_load(path / f"{name}.{kind}_index.npy") for kind in ("document", "sample")]
    return Corpus(tokens, *indices)


def _load(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r").view(np.ndarray)
