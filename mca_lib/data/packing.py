"""Documents into rows of at most `capacity` tokens, over all documents at once.

One row is filled after the other from a histogram of lengths. Each step takes, of the documents that are left,

1. one that fills the rest of the row exactly, else
2. two that fill it exactly, as equal in length as there are (the short ones are of use longest), else
3. the longest that fits.

Step 3 alone is best-fit decreasing, which leaves half a percent empty where no document is short, because each has a
system text in front; with step 2 rows are over 99.9 % full. The set of lengths that are left is one big integer, bit n
for length n, so each step is a few operations on capacity / 64 machine words.
"""

from collections.abc import Sequence

import numpy as np


def pack_documents(lengths_D: np.ndarray, capacity: int) -> list[list[int]]:
    """Indices of the documents of each row, in a fixed order that depends on the lengths alone.

    Raises:
        ValueError: a document is empty or longer than `capacity`; nothing could ever hold it.
    """
    if len(lengths_D) and not 1 <= int(lengths_D.min()) <= int(lengths_D.max()) <= capacity:
        raise ValueError(f"lengths must be within 1..{capacity}: {int(lengths_D.min())}..{int(lengths_D.max())}")
    pool = _Pool(lengths_D, capacity)
    rows = []
    while pool:
        row: list[int] = []
        room = capacity
        while lengths := pool.next_lengths(room):
            row += [pool.take(length) for length in lengths]
            room -= sum(lengths)
        rows.append(row)
    return rows


class _Pool:
    """The documents that are in no row yet, by length."""

    def __init__(self, lengths_D: np.ndarray, capacity: int) -> None:
        self._capacity = capacity
        self._documents: dict[int, list[int]] = {}
        for document in reversed(range(len(lengths_D))):
            self._documents.setdefault(int(lengths_D[document]), []).append(document)
        # Bit n: a document of length n is left. In the mirror image that is bit capacity - n.
        self._lengths = sum(1 << length for length in self._documents)
        self._mirrored = sum(1 << (capacity - length) for length in self._documents)

    def __bool__(self) -> bool:
        return self._lengths != 0

    def take(self, length: int) -> int:
        """A document of this length, the first of them."""
        documents = self._documents[length]
        document = documents.pop()
        if not documents:
            self._lengths ^= 1 << length
            self._mirrored ^= 1 << (self._capacity - length)
        return document

    def next_lengths(self, room: int) -> Sequence[int]:
        """Lengths of the next documents for a row with this room; empty when none fits."""
        if self._lengths >> room & 1:
            return (room,)
        # Bit n of the shifted mirror image: length room - n is left. The upper half of the pairs repeats the lower.
        pairs = self._lengths & (self._mirrored >> (self._capacity - room)) & ((2 << (room // 2)) - 1)
        if pairs:
            length = pairs.bit_length() - 1
            if 2 * length == room and len(self._documents[length]) == 1:
                length = (pairs ^ (1 << length)).bit_length() - 1
            if length > 0:
                return (length, room - length)
        longest = (self._lengths & ((2 << room) - 1)).bit_length() - 1
        return (longest,) if longest > 0 else ()
