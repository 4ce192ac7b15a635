"""Images in the sample of a verification: rows with none, one and several, and pixels that all sides make alike.

B rows, S tokens of a row, P patches.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from mca_lib.models.config import McaModelConfig
from mca_lib.models.vision.images import Grid, Images, features, patches
from mca_lib.models.vision.positions import document_positions
from mca_lib.models.vision.towers import TOWERS
from mca_lib.verification.sample import Sample

if TYPE_CHECKING:
    import numpy as np
    import torch

GRIDS: tuple[tuple[Grid, ...], ...] = ((), ((1, 4, 6),), ((1, 4, 4), (1, 2, 8), (1, 6, 4)), ((1, 8, 8),))
"""Of each row, for a tower that merges 2 x 2 patches; scaled for others."""
FIRST, GAP = 9, 5
"""Tokens before the first image of a row, and between two."""


def with_images(sample: Sample, config: McaModelConfig) -> Sample:
    """The sample with images in the place of some tokens; of a model of text alone as it is."""
    if config.vision is None:
        return sample
    merge = _merge(config)
    grids = tuple(tuple((t, h // 2 * merge, w // 2 * merge) for t, h, w in row) for row in GRIDS)
    rows, masks = [], []
    for ids_S, loss_S, images in zip(sample.ids_BS, sample.loss_BS, grids, strict=True):
        special = (config.vision.image_token_id, config.vision.video_token_id)
        ids_S, loss_S, at = [i if i not in special else 1 for i in ids_S], list(loss_S), FIRST
        for grid in images:
            count = features(grid, merge)
            ids_S[at : at + count] = [config.vision.image_token_id] * count
            # No loss where an image's token would be predicted.
            loss_S[at - 1 : at + count - 1] = [False] * count
            at += count + GAP
        rows.append(ids_S)
        masks.append(loss_S)
    counts = ", ".join(str(len(row)) for row in grids)
    told = f"{sample.loss_tokens}; the rows show {counts} images, whose tokens carry none"
    return replace(sample, ids_BS=rows, loss_BS=masks, loss_tokens=told, grids=grids)


def pixels(config: McaModelConfig, row: int, image: int, grid: Grid) -> "torch.Tensor":
    """Patches of an image, fp32 [P, values]."""
    import torch

    values = TOWERS[config.model_type].read(config.vision.tower).patch_values
    generator = torch.Generator().manual_seed(1000 * row + image)
    return torch.randn(patches(grid), values, generator=generator)


def images_of(config: McaModelConfig, sample: Sample, row: int) -> Images:
    """All images of a row with all their pixels."""
    return Images(sample.grids[row], {i: pixels(config, row, i, grid) for i, grid in enumerate(sample.grids[row])})


def positions_of(config: McaModelConfig, sample: Sample, row: int) -> "np.ndarray":
    """Positions of a row's tokens on three axes, [3, S]."""
    import numpy as np

    ids_S = np.array(sample.ids_BS[row])
    return document_positions(ids_S, sample.grids[row], config.vision.image_token_id, _merge(config))


def image_index(config: McaModelConfig, ids_BS: "torch.Tensor") -> "torch.Tensor":
    """Which feature of its row's images each token stands for, -1 for text, [B, S]."""
    is_image_BS = ids_BS == config.vision.image_token_id
    return (is_image_BS.cumsum(1) - 1).where(is_image_BS, -1)


def _merge(config: McaModelConfig) -> int:
    return TOWERS[config.model_type].read(config.vision.tower).merge
