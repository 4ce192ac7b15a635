"""Micro batches with images: positions on three axes, which token stands for which feature, and this rank's pixels.

The files lie in the token store; a rank of the first pipeline stage makes the pixels of the images that its tower
encodes, and of no others.

S tokens of this rank, T tokens of the micro batch over all context parallel ranks.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from mca_lib.data.image_store import StoredImage
from mca_lib.data.indexed_rows import Rows
from mca_lib.data.token_store import Row
from mca_lib.errors import DataError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.packing import zigzag_index
from mca_lib.models.vision.images import Grid, Images, shares
from mca_lib.models.vision.part import AXES
from mca_lib.models.vision.positions import document_positions
from mca_lib.models.vision.processor import pixel_values, processor_of, read_image
from mca_lib.models.vision.towers import TOWERS
from mca_lib.trainers.batches import MicroBatch


@dataclass(frozen=True)
class VisionBatch(MicroBatch):
    """A micro batch of a model that sees images; there may be none in it."""

    positions_31T: torch.Tensor
    """int64: time, height and width of all tokens of the micro batch."""
    image_index_1S: torch.Tensor
    """int64: the feature that a token stands for, counted over all images of the micro batch; -1 for text."""
    images: Images

    @property
    def positions(self) -> torch.Tensor:
        """See `MicroBatch`."""
        return self.positions_31T

    @property
    def model_arguments(self) -> dict[str, Any]:
        """See `MicroBatch`."""
        return {"images": self.images, "image_index_BS": self.image_index_1S}


class ImageCollator:
    """Adds what images need to micro batches of one split's rows.

    Args:
        path: of the split; how its images are prepared is in the meta.json beside it.

    Raises:
        DataError: the data set was made for a model whose images have another token or other patches.
    """

    def __init__(self, config: McaModelConfig, path: Path) -> None:
        self.vision, sizes = config.vision, TOWERS[config.model_type].read(config.vision.tower)
        self.merge = sizes.merge
        values = json.loads((path.parent / "meta.json").read_text(encoding="utf-8"))
        self.processor = processor_of(values["image_processor"])
        if values["image_token_id"] != self.vision.image_token_id:
            raise DataError(
                f"token store {path.parent}: images are token {values['image_token_id']}, and "
                f"{self.vision.image_token_id} to the model; build it with the model's own tokenizer"
            )
        own = (self.processor.patch_size, self.processor.temporal_patch_size, self.processor.merge_size)
        if own != (sizes.patch, sizes.temporal, sizes.merge):
            raise DataError(
                f"token store {path.parent}: its images have patches of {own} (pixels, frames, merged), and the model "
                f"reads {(sizes.patch, sizes.temporal, sizes.merge)}; build it with the model's own preprocessor_config"
            )

    def __call__(self, batch: MicroBatch, rows: Sequence[Row]) -> VisionBatch:
        """The micro batch of these rows with their images."""
        bounds = batch.packed.cu_seqlens_q.tolist()
        shown = [row.images[i] if row.images else () for row in rows for i in range(len(row.document_lengths))]
        lengths = [int(n) for row in rows for n in row.document_lengths]
        tokens = np.concatenate([np.zeros(0, dtype=np.int64), *(row.input_ids for row in rows)])
        positions_3T = np.zeros((AXES, bounds[-1]), dtype=np.int64)
        index_T = np.full(bounds[-1], -1, dtype=np.int64)
        begin = features = 0
        for number, (length, images) in enumerate(zip(lengths, shown, strict=True)):
            ids = tokens[begin : begin + length]
            start, stop = bounds[number], bounds[number + 1]
            own = document_positions(ids, [i.grid for i in images], self.vision.image_token_id, self.merge)
            positions_3T[:, start : start + length] = own
            positions_3T[:, start + length : stop] = own.max() + 1 + np.arange(stop - start - length)
            at = np.flatnonzero(ids == self.vision.image_token_id)
            index_T[start + at] = features + np.arange(len(at))
            features += len(at)
            begin += length
        positions_3T[:, bounds[len(lengths)] :] = np.arange(bounds[-1] - bounds[len(lengths)])
        device, ranks = batch.input_ids_1S.device, parallel_state.get_context_parallel_world_size()
        index = torch.from_numpy(index_T)
        if ranks > 1:
            index = index[zigzag_index(bounds, ranks)[parallel_state.get_context_parallel_rank()]]
        return VisionBatch(
            **vars(batch),
            positions_31T=torch.from_numpy(positions_3T).unsqueeze(1).to(device),
            image_index_1S=index.unsqueeze(0).to(device),
            images=self._images([image for images in shown for image in images]),
        )

    def _images(self, stored: Sequence[StoredImage]) -> Images:
        """All images, with the pixels of those that this rank encodes."""
        grids: tuple[Grid, ...] = tuple(image.grid for image in stored)
        if not parallel_state.is_pipeline_first_stage(ignore_virtual=True):
            return Images(grids, {})
        group = parallel_state.get_tensor_and_context_parallel_group()
        own = shares(grids, group.size())[group.rank()]
        return Images(grids, {i: self._pixels(stored[i]) for i in own})

    def _pixels(self, image: StoredImage) -> torch.Tensor:
        grid, pixels_PC = pixel_values(self.processor, read_image(image.data.tobytes(), "an image of the token store"))
        if grid != image.grid:
            raise DataError(f"an image of the token store has {grid} patches, and its tokens are for {image.grid}")
        return pixels_PC


def collator_of(config: McaModelConfig, rows: Rows) -> ImageCollator | None:
    """None for rows of text. Raises DataError for rows with images and a model that sees none."""
    if getattr(rows, "images", None) is None:
        return None
    if config.vision is None:
        raise DataError(f"token store {rows.path}: its rows show images, and the model is one of text")
    return ImageCollator(config, rows.path)
