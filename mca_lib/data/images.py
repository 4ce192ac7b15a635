"""Images of a data set's rows: found by path, kept by content, and as many tokens in the text as they have features.

A row names its images in the order of the marks `<image>` in its text. Each mark becomes

    <|vision_start|> <|image_pad|> x features <|vision_end|>

as transformers' processors and LLaMA-Factory's plugin write it.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from blake3 import blake3

from mca_lib.data.alignment import IMAGE_MARK, UnusableRow
from mca_lib.errors import ConfigError, DataError
from mca_lib.models.vision.directory import PAD
from mca_lib.models.vision.images import Grid, features
from mca_lib.models.vision.processor import grid_of, read_image

START, END = "<|vision_start|>", "<|vision_end|>"


@dataclass(frozen=True)
class ImageFile:
    """An image as it was when the row was encoded."""

    path: str
    digest: str
    """Of the file's bytes."""
    grid: Grid


def with_marks(text: str) -> str:
    """A rendered text with a mark in the place of each image, for people."""
    return re.sub(re.escape(START) + f"(?:{re.escape(PAD)})+" + re.escape(END), IMAGE_MARK, text)


class ImageReader:
    """Looks at image files, each once as long as it is remembered.

    Raises ConfigError where the tokenizer has no tokens for images.
    """

    def __init__(self, processor: Any, tokenizer: Any) -> None:
        vocabulary = tokenizer.get_vocab()
        if missing := [token for token in (START, PAD, END) if token not in vocabulary]:
            raise ConfigError(f"dataset.columns.images: the model's tokenizer has no {missing[0]}")
        self.processor = processor
        self.token_id: int = vocabulary[PAD]
        self.start_id: int = vocabulary[START]
        self._look = lru_cache(1 << 16)(self._read)

    def look(self, path: str) -> ImageFile:
        """Raises UnusableRow for a file that is no image."""
        return self._look(path)

    def expand(self, text: str, images: "list[ImageFile]") -> str:
        """The text with its marks written out; takes its images from the front of the list."""
        parts = text.split(IMAGE_MARK)
        written = [parts[0]]
        for part in parts[1:]:
            written += [START, PAD * features(images.pop(0).grid, self.processor.merge_size), END, part]
        return "".join(written)

    def fitting(
        self, ids: list[int], images: "tuple[ImageFile, ...]", limit: int
    ) -> "tuple[int, tuple[ImageFile, ...]]":
        """Of a document that is cut after `limit` tokens: where, so that no image is cut, and the images that stay."""
        at = [place for place, token in enumerate(ids) if token == self.token_id]
        used = 0
        for number, image in enumerate(images):
            count = features(image.grid, self.processor.merge_size)
            if at[used + count - 1] >= limit:
                first = at[used]
                return min(limit, first - (ids[first - 1] == self.start_id)), images[:number]
            used += count
        return min(limit, len(ids)), images

    def _read(self, path: str) -> ImageFile:
        data = read_file(path)
        try:
            grid = grid_of(self.processor, read_image(data, path))
        except DataError as error:
            raise UnusableRow("image cannot be used", f": {error!s:.300}") from None
        return ImageFile(path, blake3(data).hexdigest(), grid)


def read_file(path: str) -> bytes:
    """Raises UnusableRow."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UnusableRow("image cannot be read", f": {path}: {error.strerror or error}") from None
