"""Images of held-out documents, as transformers' models take them.

B documents of a batch, S positions.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mca_lib.data.image_store import StoredImage
from mca_lib.data.token_store import TokenStore
from mca_lib.models.vision.images import Grid
from mca_lib.models.vision.processor import pixel_values, processor_of, read_image


@dataclass(frozen=True)
class Picture:
    """An image of a document, whose pixels are made when they are asked for."""

    stored: StoredImage
    processor: Any
    token_id: int
    """Stands in the text for each of its features."""

    def patches(self) -> tuple[Grid, torch.Tensor]:
        """(grid, fp32 patches)."""
        return pixel_values(self.processor, read_image(self.stored.data.tobytes(), "an image of the token store"))


class Pictures:
    """The images of a split, by document."""

    def __init__(self, store: TokenStore) -> None:
        self._store = store
        if store.images is not None:
            meta = json.loads((store.path.parent / "meta.json").read_text(encoding="utf-8"))
            self._processor, self._token_id = processor_of(meta["image_processor"]), meta["image_token_id"]

    def of(self, document: int) -> tuple[Picture, ...]:
        """In the order of their tokens; none in a split of text."""
        if self._store.images is None:
            return ()
        images = self._store.images.of_document(document)
        return tuple(Picture(image, self._processor, self._token_id) for image in images)


def image_arguments(model: Any, input_ids_BS: torch.Tensor, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
    """Arguments of a model for the images of a batch, which lie in the order of its documents; none without images."""
    if not pictures:
        return {}
    grids, patches = zip(*(picture.patches() for picture in pictures), strict=True)
    device = input_ids_BS.device
    return {
        "pixel_values": torch.cat(patches).to(device=device, dtype=model.dtype),
        "image_grid_thw": torch.tensor(grids, device=device),
        "mm_token_type_ids": (input_ids_BS == model.config.image_token_id).int(),
    }
