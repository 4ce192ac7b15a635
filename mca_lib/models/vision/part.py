"""The vision part of `McaModelConfig`. No torch."""

from dataclasses import dataclass
from typing import Any

from mca_lib.errors import ModelError

AXES = 3
"""Of a position: time, height, width."""


@dataclass(frozen=True)
class Vision:
    """What a model has beside its transformer to see images, and how positions of images rotate."""

    tower: dict[str, Any]
    """The source's `vision_config`, whole: transformers builds the tower from it."""
    image_token_id: int
    """Stands in a row for each feature of an image."""
    video_token_id: int
    """The same for videos, which are refused."""
    mrope_section: tuple[int, ...]
    """Pairs of channels of a head that rotate by time, height and width (https://arxiv.org/abs/2409.12191, 2.1)."""
    mrope_interleaved: bool = False
    """The pairs alternate, t h w t h w ... t t; else they lie in three blocks."""
    deepstack_layers: int = 0
    """First layers whose output gets features of the image added (https://arxiv.org/abs/2406.04334)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mrope_section", tuple(self.mrope_section))
        if len(self.mrope_section) != AXES or any(type(n) is not int or n < 0 for n in self.mrope_section):
            raise ModelError(
                f"model config: mrope_section={list(self.mrope_section)} must be three numbers of channel pairs, for "
                "time, height and width"
            )
        if self.image_token_id == self.video_token_id:
            raise ModelError(f"model config: image_token_id and video_token_id are both {self.image_token_id}")

    def axes(self, pairs: int) -> list[int]:
        """For each of the head's channel pairs, the axis by which it rotates: 0 time, 1 height, 2 width.

        As transformers: `apply_multimodal_rotary_pos_emb` of qwen2_vl, `recomposition_frequencies` of qwen3_vl.
        Raises ModelError when the sections are not those of such a head.
        """
        time, height, width = self.mrope_section
        if sum(self.mrope_section) != pairs:
            raise ModelError(
                f"model config: mrope_section={list(self.mrope_section)} adds up to {sum(self.mrope_section)}, and a "
                f"head has {pairs} pairs of channels"
            )
        if not self.mrope_interleaved:
            return [0] * time + [1] * height + [2] * width
        axes = [0] * pairs
        for axis, count in ((1, height), (2, width)):
            for pair in range(axis, min(3 * count, pairs), 3):
                axes[pair] = axis
        return axes
