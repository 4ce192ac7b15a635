"""Encoded samples on disk until their order is known: 5 bytes a token, and 32 bytes of digests each in memory."""

import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from blake3 import blake3

from mca_lib.data.encoding import DIGEST_BYTES, EncodedChunk
from mca_lib.data.images import ImageFile


class Spill:
    """Samples end to end in two files below `folder`; the folder is removed at the end of the `with` block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        self._tokens = (folder / "tokens.bin").open("wb")
        self._mask = (folder / "mask.bin").open("wb")
        self._lengths: list[np.ndarray] = []
        self._first: list[np.ndarray] = []
        self._held_out: list[np.ndarray] = []
        self.digests: list[bytes] = []
        """Of tokens and mask, and in a pair of where its second document begins, per sample."""
        self.contents: list[bytes] = []
        """Of the text, per sample."""
        self.images: list[tuple[ImageFile, ...]] = []
        """Per sample."""

    def add(self, chunk: EncodedChunk) -> None:
        self._tokens.write(chunk.tokens_T.data)
        self._mask.write(chunk.mask_T.data)
        self._lengths.append(chunk.lengths_N)
        self._first.append(chunk.first_N)
        self._held_out.append(chunk.held_out_N)
        self.contents += chunk.contents
        self.images += chunk.images
        ends = np.cumsum(chunk.lengths_N)
        spans = zip((ends - chunk.lengths_N).tolist(), ends.tolist(), chunk.first_N, chunk.images, strict=True)
        for start, end, first, images in spans:
            content = blake3(chunk.tokens_T[start:end].tobytes()).update(chunk.mask_T[start:end].tobytes())
            if first < end - start:
                content.update(b"%d" % first)
            for image in images:
                content.update(image.digest.encode("ascii"))
            self.digests.append(content.digest(length=DIGEST_BYTES))

    def freeze(self) -> None:
        """No more samples: they can now be read by `sample`."""
        self._tokens.close()
        self._mask.close()
        self.lengths = np.concatenate([np.zeros(0, dtype=np.int64), *self._lengths])
        self.first = np.concatenate([np.zeros(0, dtype=np.int64), *self._first])
        self.held_out = np.concatenate([np.zeros(0, dtype=bool), *self._held_out])
        self._offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        if len(self.lengths):
            self._tokens_T = np.memmap(self._folder / "tokens.bin", dtype=np.int32, mode="r")
            self._mask_T = np.memmap(self._folder / "mask.bin", dtype=bool, mode="r")

    def __len__(self) -> int:
        return len(self.digests)

    def piece(self, sample: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens [end - start], mask [end - start]) of a part of one sample."""
        first = int(self._offsets[sample])
        return self._tokens_T[first + start : first + end], self._mask_T[first + start : first + end]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tokens.close()
        self._mask.close()
        shutil.rmtree(self._folder, ignore_errors=True)
