"""Encoded samples become the rows of a split: shuffled, cut into blocks where they are too long, packed, written."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from mca_lib.data.packing import pack_documents
from mca_lib.data.spill import Spill
from mca_lib.data.split import permutation
from mca_lib.data.token_store import TokenStore, TokenStoreWriter


class Document(NamedTuple):
    """A part of a sample: all of it, but for long plain text and for pairs of answers."""

    sample: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def write_split(
    path: Path, spill: Spill, samples: np.ndarray, *, cutoff_len: int, packing: bool, seed: int
) -> TokenStore:
    """Write the given samples (int64 [n], at least one) as one split and open it.

    Their order is drawn with `seed`; so is the order of the packs. The two documents of a pair stand side by side in
    one row, the chosen one first. A row then holds up to 2 · `cutoff_len` tokens, since each document may have
    `cutoff_len`.
    """
    order = samples[permutation(len(samples), seed, "documents")].tolist()
    units = [unit for sample in order for unit in _units(spill, sample, cutoff_len)]
    rows = [[index] for index in range(len(units))]
    if packing:
        capacity = cutoff_len * max(len(unit) for unit in units)
        rows = pack_documents(np.array([sum(d.length for d in unit) for unit in units], dtype=np.int64), capacity)
        rows = [rows[index] for index in permutation(len(rows), seed, "packs")]
    with TokenStoreWriter(path) as writer:
        for row in rows:
            documents = [document for index in row for document in units[index]]
            # Images are of conversations, which are never cut into blocks.
            images = [spill.images[document.sample] for document in documents]
            writer.add_row([spill.piece(*document) for document in documents], images)
    return TokenStore.open(path)


def _units(spill: Spill, sample: int, cutoff_len: int) -> list[list[Document]]:
    """What of a sample has to stay in one row: each block of a text by itself, the two documents of a pair together."""
    length, first = int(spill.lengths[sample]), int(spill.first[sample])
    if first < length:
        return [[Document(sample, 0, first), Document(sample, first, length)]]
    return [[block] for block in blocks(sample, length, cutoff_len)]


def blocks(sample: int, length: int, cutoff_len: int) -> list[Document]:
    """Cut a sample into blocks of at most `cutoff_len` tokens, without losing its tail.

    Each block after the first begins with the last token of the one before. That token only gives context, so every
    token of the text but the first is predicted exactly once.
    """
    starts = range(0, max(length - 1, 1), cutoff_len - 1)
    return [Document(sample, start, min(start + cutoff_len, length)) for start in starts]
