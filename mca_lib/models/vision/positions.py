"""Positions of three axes, time, height and width (M-RoPE, https://arxiv.org/abs/2409.12191, section 2.1). No torch.

Text goes on by one on all axes. An image begins where the text has come to: all of its features have the time of that
position, and the row and the column of the feature are added for height and width. What follows begins behind the
largest of its positions:

    tokens    a  b  [2 x 3 features of an image]  c
    time      0  1   2 2 2 2 2 2                  5
    height    0  1   2 2 2 3 3 3                  5
    width     0  1   2 3 4 2 3 4                  5

As `get_rope_index` of transformers' models.
"""

from collections.abc import Sequence

import numpy as np

from mca_lib.errors import DataError
from mca_lib.models.vision.images import Grid, features
from mca_lib.models.vision.part import AXES


def document_positions(ids_S: np.ndarray, grids: Sequence[Grid], image_token_id: int, merge: int) -> np.ndarray:
    """Positions of a document's tokens, int64 [3, S].

    Raises DataError when the document has other tokens of images than the grids have features.
    """
    positions_3S = np.empty((AXES, len(ids_S)), dtype=np.int64)
    at = np.flatnonzero(ids_S == image_token_id)
    if len(at) != sum(features(grid, merge) for grid in grids):
        raise DataError(f"a document has {len(at)} tokens of images, and its {len(grids)} images have other features")
    begin = position = used = 0
    for grid in grids:
        start, count = int(at[used]), features(grid, merge)
        used += count
        if start + count - 1 != at[used - 1]:
            raise DataError("the tokens of an image do not lie end to end")
        text = start - begin
        positions_3S[:, begin:start] = np.arange(position, position + text)
        position += text
        time, height, width = grid[0], grid[1] // merge, grid[2] // merge
        positions_3S[:, start : start + count] = position + np.indices((time, height, width)).reshape(AXES, -1)
        position += max(height, width)
        begin = start + count
    positions_3S[:, begin:] = np.arange(position, position + len(ids_S) - begin)
    return positions_3S
