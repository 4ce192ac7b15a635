"""Images beside the tokens of a split: each file's bytes once, and which documents show them.

    image_bytes.npy       uint8 [bytes]    files end to end, in the order in which documents show them first
    image_offsets.npy     int64 [K+1]      file k is image_bytes[image_offsets[k]:image_offsets[k+1]]
    image_files.npy       int64 [I]        file of each image that is shown, document by document
    image_grids.npy       int64 [I, 3]     its patches along time, height and width
    document_images.npy   int64 [D+1]      document d shows the images document_images[d]:document_images[d+1]

A split without images has none of these files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from mca_lib.data.growing_array import GrowingArray, map_array
from mca_lib.data.images import ImageFile, read_file
from mca_lib.errors import DataError
from mca_lib.models.vision.images import Grid

ARRAYS = ("image_bytes", "image_offsets", "image_files", "image_grids", "document_images")


@dataclass(frozen=True)
class StoredImage:
    """An image that a document shows."""

    grid: Grid
    data: np.ndarray
    """uint8: the file."""


class ImageStore:
    """Read access."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    @classmethod
    def open(cls, path: Path) -> "ImageStore | None":
        """Of a split; None where it has no images. Raises DataError."""
        if not (path / f"{ARRAYS[0]}.npy").is_file():
            return None
        return cls({name: map_array(path / f"{name}.npy") for name in ARRAYS})

    def of_document(self, document: int) -> tuple[StoredImage, ...]:
        """In the order of their tokens."""
        first, last = self.arrays["document_images"][document : document + 2].tolist()
        return tuple(self._image(i) for i in range(first, last))

    def _image(self, index: int) -> StoredImage:
        file = int(self.arrays["image_files"][index])
        start, stop = self.arrays["image_offsets"][file : file + 2].tolist()
        return StoredImage(tuple(self.arrays["image_grids"][index].tolist()), self.arrays["image_bytes"][start:stop])


class ImageStoreWriter:
    """Writes the arrays, document by document."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes: GrowingArray | None = None
        self._offsets, self._documents = [0], [0]
        self._files: list[int] = []
        self._grids: list[Grid] = []
        self._known: dict[str, int] = {}

    def add(self, images: Sequence[ImageFile]) -> None:
        """The images of the next document. Raises DataError for a file that is another one by now."""
        for image in images:
            if image.digest not in self._known:
                self._known[image.digest] = self._write(image)
            self._files.append(self._known[image.digest])
            self._grids.append(image.grid)
        self._documents.append(len(self._files))

    def close(self) -> None:
        """Complete the files; without any image nothing is left."""
        if self._bytes is None:
            return
        self._bytes.close()
        arrays = zip(ARRAYS[1:], (self._offsets, self._files, self._grids, self._documents), strict=True)
        for name, values in arrays:
            np.save(self._path / f"{name}.npy", np.array(values, dtype=np.int64))

    def abandon(self) -> None:
        if self._bytes is not None:
            self._bytes.abandon()

    def _write(self, image: ImageFile) -> int:
        data = read_file(image.path)
        if blake3(data).hexdigest() != image.digest:
            raise DataError(f"{image.path} changed while the data set was made; run again")
        if self._bytes is None:
            self._bytes = GrowingArray(self._path / f"{ARRAYS[0]}.npy", np.dtype(np.uint8))
        self._bytes.append(np.frombuffer(data, dtype=np.uint8))
        self._offsets.append(self._offsets[-1] + len(data))
        return len(self._offsets) - 2
