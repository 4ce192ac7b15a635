"""Images of a micro batch, and which rank's tower looks at which of them.

The ranks that share a micro batch (tensor x context parallel) hold the same tower. Each encodes a part of the images,
and all get the features of all: `shares` deals them out, so that no rank waits long for another. No torch.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Grid = tuple[int, int, int]
"""Patches of an image along time, height and width."""


@dataclass(frozen=True)
class Images:
    """The images of one micro batch, in the order of their tokens. The same on all ranks but for the pixels."""

    grids: tuple[Grid, ...]
    pixels: "dict[int, torch.Tensor]" = field(repr=False)
    """Number of an image → its patches [patches, values], of those at least that this rank encodes."""


def patches(grid: Grid) -> int:
    """Patches of an image."""
    return math.prod(grid)


def features(grid: Grid, merge: int) -> int:
    """Tokens that stand for an image, `merge` x `merge` patches for each."""
    time, height, width = grid
    return time * (height // merge) * (width // merge)


def shares(grids: Sequence[Grid], ranks: int) -> list[list[int]]:
    """Numbers of the images that each rank encodes: the largest goes to the rank with the fewest patches so far."""
    held: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]
    for image in sorted(range(len(grids)), key=lambda i: (-patches(grids[i]), i)):
        busy, rank = heapq.heappop(load)
        held[rank].append(image)
        heapq.heappush(load, (busy + patches(grids[image]), rank))
    return held
