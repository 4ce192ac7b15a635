"""Arrays of a token store: one-dimensional files that grow, and files mapped into memory."""

from pathlib import Path
from typing import BinaryIO

import numpy as np

from mca_lib.errors import DataError


class GrowingArray:
    """A one-dimensional .npy file that is appended to; its header is rewritten in place on closing."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._path, self._dtype, self._length = path, dtype, 0
        self._file: BinaryIO = path.open("wb")
        self._header_size = self._write_header()

    def append(self, values: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).data)
        self._length += len(values)

    def close(self) -> None:
        self._file.seek(0)
        size = self._write_header()
        self._file.close()
        if size != self._header_size:
            raise RuntimeError(f"{self._path}: the header grew from {self._header_size} to {size} bytes")

    def abandon(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _write_header(self) -> int:
        # numpy pads the header so that the first axis can grow without moving the data.
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()


def map_array(path: Path) -> np.ndarray:
    """An array of a token store, mapped into memory. Raises DataError."""
    try:
        # A plain view: slicing the memmap subclass costs several times as much.
        return np.load(path, mmap_mode="r").view(np.ndarray)
    except (OSError, ValueError) as error:
        raise DataError(f"token store {path.parent}: {path.name} cannot be read ({error}); build it again") from None
