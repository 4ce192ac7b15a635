"""Megatron's indexed format, checked before it is used and written without a list of all documents in memory.

    corpus.bin    token ids end to end, uint16 or int32
    corpus.idx    "MMIDIDX\\0\\0", version u64 = 1, dtype u8, documents u64, documents + 1 u64,
                  lengths int32 [D], byte offsets int64 [D], document borders int64 [D+1] = 0..D

(megatron/core/datasets/indexed_dataset.py, whose `IndexedDataset` reads both. It asserts where this module explains,
and its writer loops over documents.) No torch here, so a recipe is checked in milliseconds.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mca_lib.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
DTYPES = {4: np.dtype(np.int32), 8: np.dtype(np.uint16)}
_BLOCK = 1 << 24


@dataclass(frozen=True)
class Indexed:
    """One corpus, mapped into memory."""

    prefix: Path
    """Path without .bin and .idx."""
    lengths_D: np.ndarray
    """int32 [D]: tokens of each document."""
    offsets_D: np.ndarray
    """int64 [D]: bytes before each document."""
    tokens_T: np.ndarray
    """uint16 or int32 [T]."""

    def starts(self, documents_N: np.ndarray | int | slice) -> np.ndarray:
        """int64 [N]: tokens before each of these documents."""
        return self.offsets_D[documents_N] // self.tokens_T.itemsize

    def check(self) -> int:
        """Read all of it. Returns the largest id.

        Raises:
            DataError: documents without tokens, in disorder, or with negative ids.
        """
        ends_D = np.cumsum(self.lengths_D, dtype=np.int64)
        if int(self.lengths_D.min()) < 1 or not np.array_equal(ends_D - self.lengths_D, self.starts(slice(None))):
            raise DataError(f"{self.prefix}.idx: its documents are empty or do not lie end to end; write it again")
        blocks = [self.tokens_T[start : start + _BLOCK] for start in range(0, len(self.tokens_T), _BLOCK)]
        if min(int(block.min()) for block in blocks) < 0:
            raise DataError(f"{self.prefix}.bin: holds negative token ids; it is damaged")
        return max(int(block.max()) for block in blocks)


def token_dtype(vocab_size: int) -> np.dtype:
    """What holds ids below `vocab_size`, as datatrove and Megatron choose it."""
    return DTYPES[8] if vocab_size <= 1 << 16 else DTYPES[4]


def open_indexed(prefix: Path) -> Indexed:
    """Map a corpus into memory; milliseconds whatever its size.

    Raises:
        DataError: a file is missing or damaged, of another dtype, not one sequence per document, or without tokens.
    """
    index, data = prefix.with_name(prefix.name + ".idx"), prefix.with_name(prefix.name + ".bin")
    try:
        with index.open("rb") as file:
            header = file.read(_HEADER.size)
        index_bytes, data_bytes = index.stat().st_size, data.stat().st_size
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from None
    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        raise DataError(f"{index}: not an index of Megatron's format (it begins with {header[:9]!r}); tokenize again")
    _, version, code, documents, borders = _HEADER.unpack(header)
    if version != 1 or code not in DTYPES:
        known = ", ".join(f"{number} ({dtype})" for number, dtype in DTYPES.items())
        raise DataError(f"{index}: version {version} and dtype {code}; supported are version 1 and dtypes {known}")
    if borders != documents + 1:
        raise DataError(
            f"{index}: {documents} sequences in {borders - 1} documents; write each document as one sequence"
        )
    if index_bytes != _HEADER.size + 20 * documents + 8:
        raise DataError(f"{index}: {index_bytes} bytes, not the {_HEADER.size + 20 * documents + 8} of its header")
    if not documents or not data_bytes:
        raise DataError(f"{data}: holds no tokens")
    lengths_D = np.memmap(index, np.int32, "r", _HEADER.size, (documents,)).view(np.ndarray)
    offsets_D = np.memmap(index, np.int64, "r", _HEADER.size + lengths_D.nbytes, (documents,)).view(np.ndarray)
    expected = int(offsets_D[-1]) + int(lengths_D[-1]) * DTYPES[code].itemsize
    if data_bytes != expected:
        raise DataError(
            f"{data}: {data_bytes} bytes, but its index tells of {expected}; the file was cut off or replaced"
        )
    return Indexed(prefix, lengths_D, offsets_D, np.memmap(data, DTYPES[code], "r").view(np.ndarray))


def write_index(path: Path, lengths_D: np.ndarray, dtype: np.dtype) -> None:
    """The .idx of documents of these lengths that lie end to end."""
    lengths_D = lengths_D.astype(np.int32)
    code = next(code for code, known in DTYPES.items() if known == dtype)
    documents = len(lengths_D)
    offsets_D = (np.cumsum(lengths_D, dtype=np.int64) - lengths_D) * dtype.itemsize
    with path.open("wb") as file:
        file.write(_HEADER.pack(MAGIC, 1, code, documents, documents + 1))
        for array in (lengths_D, offsets_D, np.arange(documents + 1, dtype=np.int64)):
            file.write(array.data)
