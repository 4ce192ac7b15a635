"""Encoded samples become the rows of a split: shuffled, cut into blocks where they are too long, packed, written."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from mca_lib.data.packing import pack_documents
from mca_lib.data.spill import Spill
from mca_lib.data.split import permutation
from mca_lib.data.token_store import TokenStore, TokenStoreWriter


class Document(NamedTuple):
    """A part of a sample: all of it, but for long plain text."""

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

    Their order is drawn with `seed`; so is the order of the packs.
    """
    order = samples[permutation(len(samples), seed, "documents")].tolist()
    documents = [block for sample in order for block in blocks(sample, int(spill.lengths[sample]), cutoff_len)]
    rows = [[index] for index in range(len(documents))]
    if packing:
        rows = pack_documents(np.array([d.length for d in documents], dtype=np.int64), cutoff_len)
        rows = [rows[index] for index in permutation(len(rows), seed, "packs")]
    with TokenStoreWriter(path) as writer:
        for row in rows:
            writer.add_row([spill.piece(*documents[index]) for index in row])
    return TokenStore.open(path)


def blocks(sample: int, length: int, cutoff_len: int) -> list[Document]:
    """Cut a sample into blocks of at most `cutoff_len` tokens, without losing its tail.

    Each block after the first begins with the last token of the one before. That token only gives context, so every
    token of the text but the first is predicted exactly once.
    """
    starts = range(0, max(length - 1, 1), cutoff_len - 1)
    return [Document(sample, start, min(start + cutoff_len, length)) for start in starts]
