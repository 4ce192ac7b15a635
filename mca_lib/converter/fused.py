"""Rows of a weight table whose source holds in one tensor what Megatron's row takes from several. No torch.

Phi-3     qkv_proj        q | k | v      →  q0 q1 k0 v0 | q2 q3 k1 v1 | ...
          gate_up_proj    gate | up      →  a share of each on every rank
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from mca_lib.converter.mapping import Mapping, Segment, Shape

if TYPE_CHECKING:
    from mca_lib.models.config import McaModelConfig


@dataclass(frozen=True)
class Fused(Mapping):
    """A row along axis 0 whose source tensors lie end to end in one."""

    of: Mapping
    """The row that takes them one by one."""

    def hf_shapes(self, config: "McaModelConfig") -> tuple[Shape, ...]:
        shapes = self.of.hf_shapes(config)
        return ((sum(shape[0] for shape in shapes), *shapes[0][1:]),)

    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        first = (0, *accumulate(shape[0] for shape in self.of.hf_shapes(config)))
        for source, start, stop in self.of.segments(config, rank, size):
            yield Segment(0, first[source] + start, first[source] + stop)


def fused(row: Mapping, hf: str) -> Fused:
    """The row, from the one tensor `hf` of the source."""
    return Fused(row.mca, hf, row, when=row.when, layers=row.layers)
