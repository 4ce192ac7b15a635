"""Parts of a tensor that a source stores stacked: `X[3]` is element 3 along the first axis of the stored tensor `X`.

Weight tables name parts (`experts.down_proj[{expert}]`), since Megatron has a tensor for each; files hold the whole.
No torch at import.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mca_lib.converter.mapping import Shape, TensorSlice

_PART = re.compile(r"(.+)\[(\d+)\]")


def whole(name: str) -> str:
    """The stored tensor that has the part; any other name as it is."""
    return match[1] if (match := _PART.fullmatch(name)) else name


def number(name: str) -> int | None:
    """Which part of the stored tensor this is; None: all of it."""
    return int(match[2]) if (match := _PART.fullmatch(name)) else None


def stacked_shapes(shapes: Mapping[str, "Shape"]) -> dict[str, "Shape"]:
    """Stored tensors and their shapes, for those of parts and of tensors that are no parts, in the same order."""
    counts: dict[str, int] = {}
    for name in shapes:
        counts[whole(name)] = counts.get(whole(name), 0) + 1
    return {
        whole(name): shape if number(name) is None else (counts[whole(name)], *shape) for name, shape in shapes.items()
    }


def part_names(stored: Mapping[str, "Shape"], wanted: Iterable[str]) -> dict[str, list[str]]:
    """Stored tensor → its parts, as many as it has; of those of which `wanted` names a part."""
    split = {whole(name) for name in wanted if number(name) is not None}
    return {name: [f"{name}[{i}]" for i in range(stored[name][0])] for name in split if name in stored}


@dataclass(frozen=True)
class StackedPart:
    """A part of a stacked tensor, to be indexed as a tensor of its own."""

    stacked: "TensorSlice"
    number: int

    @property
    def dtype(self) -> "torch.dtype":
        return self.stacked.dtype

    def __getitem__(self, index: object) -> "torch.Tensor":
        inner = index if isinstance(index, tuple) else (index,)
        return self.stacked[(slice(self.number, self.number + 1), *inner)][0]
