"""A memory-mapped store of token sequences: about 4.1 bytes a token, opened in milliseconds, shared by all ranks.

    <split>/tokens.npy             int32 [T]           all documents end to end
    <split>/loss_mask.npy          uint8 [ceil(T/8)]   bits, first token in the highest bit; 1 = predicted with loss
    <split>/document_offsets.npy   int64 [D+1]         document d is tokens[document_offsets[d]:document_offsets[d+1]]
    <split>/row_offsets.npy        int64 [R+1]         row r is row_documents[row_offsets[r]:row_offsets[r+1]]
    <split>/row_documents.npy      int64 [D]           every document belongs to exactly one row

and where documents show images, those of `mca_lib/data/image_store.py`.

A row is one training sequence: one document, or a pack of documents that must not see each other. The mask of a
document's first token is always 0, because nothing before it could predict it; so the sum of the mask is the number
of labels.

Shapes: T tokens, D documents, R rows, S tokens of one row, N documents of one row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from mca_lib.data.growing_array import GrowingArray, map_array
from mca_lib.data.image_store import ImageStore, ImageStoreWriter, StoredImage
from mca_lib.data.images import ImageFile
from mca_lib.errors import DataError

IGNORE_INDEX = -100

ARRAYS = ("tokens", "loss_mask", "document_offsets", "row_offsets", "row_documents")


@dataclass(frozen=True)
class Row:
    """One training sequence. Labels are already shifted: logits at s are compared with labels_S[s]."""

    input_ids: np.ndarray
    """int64 [S]."""
    labels: np.ndarray
    """int64 [S]: the next token of the same document; -100 without loss and at each document's last token."""
    position_ids: np.ndarray
    """int64 [S]: restarts from 0 in each document."""
    document_lengths: np.ndarray
    """int64 [N]: sums to S."""
    documents: np.ndarray
    """int64 [N]: number of each document in the split."""
    images: tuple[tuple[StoredImage, ...], ...] = ()
    """Of each document; empty for a split without images."""


class TokenStore(Sequence[Row]):
    """Read access to one split."""

    def __init__(self, path: Path, arrays: dict[str, np.ndarray]) -> None:
        self.path = path
        self.digest: str | None = None
        """Of what it holds, where the caller knows it."""
        self._arrays = arrays
        self.images: ImageStore | None = None
        self.tokens_T = arrays["tokens"]
        self._mask_bits = arrays["loss_mask"]
        self.document_offsets = arrays["document_offsets"]
        self.row_offsets = arrays["row_offsets"]
        self.row_documents = arrays["row_documents"]

    @classmethod
    def open(cls, path: str | Path) -> "TokenStore":
        """Map the split at `path` into memory.

        Raises:
            DataError: an array is missing, or the arrays do not belong together.
        """
        path = Path(path)
        arrays = {name: map_array(path / f"{name}.npy") for name in ARRAYS}
        store = cls(path, arrays)
        store.images = ImageStore.open(path)
        tokens, documents = len(store.tokens_T), len(store.row_documents)
        consistent = (
            len(store._mask_bits) == -(-tokens // 8)
            and len(store.document_offsets) == documents + 1
            and store.document_offsets[-1] == tokens
            and store.row_offsets[-1] == documents
        )
        if not consistent:
            raise DataError(f"token store {path}: its arrays do not belong together; build it again")
        return store

    def __reduce__(self) -> tuple:
        # By path: pickling a memory map would copy its bytes into every worker.
        return TokenStore.open, (self.path,)

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        """Row `index`; negative indices count from the end. Raises IndexError."""
        row = range(len(self))[index]
        documents_N = self.row_documents[self.row_offsets[row] : self.row_offsets[row + 1]]
        starts_N, stops_N = self.document_offsets[documents_N], self.document_offsets[documents_N + 1]
        lengths_N = stops_N - starts_N
        spans = list(zip(starts_N.tolist(), stops_N.tolist(), strict=True))
        if np.array_equal(starts_N[1:], stops_N[:-1]):
            # As the writer leaves them: the documents of a row lie side by side.
            spans = [(spans[0][0], spans[-1][1])]
        pieces = [self._span(*span) for span in spans]
        input_ids_S = np.concatenate([tokens for tokens, _ in pieces]).astype(np.int64)
        mask_S = np.concatenate([mask for _, mask in pieces])
        # A document's first token has mask 0, so shifting the whole row never crosses a document's border.
        labels_S = np.full_like(input_ids_S, IGNORE_INDEX)
        labels_S[:-1] = np.where(mask_S[1:], input_ids_S[1:], IGNORE_INDEX)
        first_positions_N = np.cumsum(lengths_N) - lengths_N
        position_ids_S = np.arange(len(input_ids_S), dtype=np.int64) - np.repeat(first_positions_N, lengths_N)
        images = () if self.images is None else tuple(self.images.of_document(int(d)) for d in documents_N)
        return Row(input_ids_S, labels_S, position_ids_S, lengths_N, documents_N, images)

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32 [L], loss mask bool [L]) of one document."""
        return self._span(int(self.document_offsets[index]), int(self.document_offsets[index + 1]))

    def lengths_of(self, rows: Sequence[int]) -> np.ndarray:
        """int64 [N]: tokens of each document of these rows."""
        spans = [self.row_documents[self.row_offsets[row] : self.row_offsets[row + 1]] for row in rows]
        return self.document_lengths[np.concatenate(spans)]

    def _span(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        first_byte = start // 8
        bits = np.unpackbits(self._mask_bits[first_byte : -(-stop // 8)])
        shift = start - 8 * first_byte
        return self.tokens_T[start:stop], bits[shift : shift + stop - start].astype(bool)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All of them by name, as in the files, those of images at the end."""
        return self._arrays | (self.images.arrays if self.images is not None else {})

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_T)

    @property
    def num_documents(self) -> int:
        return len(self.row_documents)

    @cached_property
    def num_loss_tokens(self) -> int:
        """Number of labels that are not -100, over all rows."""
        return int(np.bitwise_count(self._mask_bits).sum(dtype=np.int64))

    @cached_property
    def document_lengths(self) -> np.ndarray:
        """int64 [D]."""
        return np.diff(self.document_offsets)

    @cached_property
    def row_lengths(self) -> np.ndarray:
        """int64 [R]: tokens per row."""
        ends = np.concatenate([[0], np.cumsum(self.document_lengths[self.row_documents])])
        return np.diff(ends[self.row_offsets])


class TokenStoreWriter:
    """Writes one split, document by document, in constant memory per token.

    with TokenStoreWriter(path) as writer:
        writer.add_row([(tokens, loss_mask), ...])

    The header of the growing arrays is completed on leaving the block; after an exception nothing readable is left.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._tokens = GrowingArray(self.path / "tokens.npy", np.dtype(np.int32))
        self._mask = GrowingArray(self.path / "loss_mask.npy", np.dtype(np.uint8))
        self._images = ImageStoreWriter(self.path)
        self._pending_bits = np.zeros(0, dtype=bool)
        self._document_offsets = [0]
        self._row_offsets = [0]

    def add_row(
        self,
        documents: Sequence[tuple[Sequence[int] | np.ndarray, Sequence[bool] | np.ndarray]],
        images: Sequence[Sequence[ImageFile]] = (),
    ) -> None:
        """Append one row of (tokens [L], loss mask [L]) documents. The mask of each first token is cleared.

        Args:
            images: of each document; none at all for a row without.
        """
        if not documents:
            raise ValueError("a row needs at least one document")
        shown = images or [()] * len(documents)
        for (tokens, loss_mask), own in zip(documents, shown, strict=True):
            self._add_document(np.asarray(tokens), np.array(loss_mask, dtype=bool))
            self._images.add(own)
        self._row_offsets.append(len(self._document_offsets) - 1)

    def _add_document(self, tokens_L: np.ndarray, mask_L: np.ndarray) -> None:
        if tokens_L.ndim != 1 or len(tokens_L) == 0 or tokens_L.shape != mask_L.shape:
            raise ValueError(f"a document needs tokens and mask of one length > 0: {tokens_L.shape}, {mask_L.shape}")
        mask_L[0] = False
        self._tokens.append(tokens_L)
        self._document_offsets.append(self._document_offsets[-1] + len(tokens_L))
        bits = np.concatenate([self._pending_bits, mask_L])
        whole = len(bits) - len(bits) % 8
        self._mask.append(np.packbits(bits[:whole]))
        self._pending_bits = bits[whole:]

    def close(self) -> None:
        """Complete the files. Raises ValueError when there is no row."""
        if len(self._row_offsets) == 1:
            raise ValueError("a token store needs at least one row")
        self._mask.append(np.packbits(self._pending_bits))
        self._tokens.close()
        self._mask.close()
        self._images.close()
        documents = len(self._document_offsets) - 1
        np.save(self.path / "document_offsets.npy", np.array(self._document_offsets, dtype=np.int64))
        np.save(self.path / "row_offsets.npy", np.array(self._row_offsets, dtype=np.int64))
        np.save(self.path / "row_documents.npy", np.arange(documents, dtype=np.int64))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._tokens.abandon()
            self._mask.abandon()
            self._images.abandon()
