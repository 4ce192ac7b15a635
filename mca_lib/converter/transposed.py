"""Rows of a weight table for experts that a source stores as [inputs, outputs], the way in which GPT-OSS has them.

    TransposedRow      aᵀ                             inputs are split (a row-parallel layer)
    InterleavedMLP     (gate0 up0 gate1 up1 ...)ᵀ     gate and up take turns over the outputs; each is split on its own

None of these is bytes of the source in another place, so they are always brought through memory. No torch at import.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mca_lib.converter.mapping import Mapping, Segment, Shape, TensorSlice, share, sizes

if TYPE_CHECKING:
    import torch

    from mca_lib.converter.file_tensor import FileTensor, Run
    from mca_lib.models.config import McaModelConfig


@dataclass(frozen=True)
class _Rearranged(Mapping):
    """`segments` are consecutive features of the source that a rank owns; `fill` and `to_hf` say how."""

    def runs(self, parts: Sequence[TensorSlice], config: "McaModelConfig") -> "list[Run] | None":
        return None

    def hf_runs(self, tensor: "FileTensor", config: "McaModelConfig") -> "list[list[Run]] | None":
        return None


@dataclass(frozen=True)
class TransposedRow(_Rearranged):
    """Weight of a row-parallel linear layer, stored as [input, output]."""

    dims: tuple[str, str]
    """(output, input)."""

    def hf_shapes(self, config: "McaModelConfig") -> tuple[Shape, ...]:
        outputs, inputs = sizes(config, self.dims)
        return ((inputs, outputs),)

    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        yield Segment(0, *share(self.hf_shapes(config)[0][0], rank, size))

    def local_shape(self, config: "McaModelConfig", rank: int, size: int) -> Shape:
        inputs, outputs = self.hf_shapes(config)[0]
        return (outputs, inputs // size)

    def fill(
        self,
        destination: "torch.Tensor",
        parts: Sequence[TensorSlice],
        config: "McaModelConfig",
        rank: int = 0,
        size: int = 1,
    ) -> None:
        start, stop = share(self.hf_shapes(config)[0][0], rank, size)
        destination.copy_(parts[0][start:stop].T)

    def to_hf(self, tensor: "torch.Tensor", config: "McaModelConfig") -> list["torch.Tensor"]:
        return [tensor.T]


@dataclass(frozen=True)
class InterleavedMLP(_Rearranged):
    """Gate and up of a gated MLP in turns: a weight stored as [input, 2 x output], or a bias."""

    dims: tuple[str, ...]
    """Of one half: (output, input), or of a bias (output,)."""

    def hf_shapes(self, config: "McaModelConfig") -> tuple[Shape, ...]:
        outputs, *inputs = sizes(config, self.dims)
        return ((*inputs, 2 * outputs),)

    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        start, stop = share(sizes(config, self.dims)[0], rank, size)
        yield Segment(0, 2 * start, 2 * stop)

    def local_shape(self, config: "McaModelConfig", rank: int, size: int) -> Shape:
        outputs, *inputs = sizes(config, self.dims)
        return (2 * outputs // size, *inputs)

    def fill(
        self,
        destination: "torch.Tensor",
        parts: Sequence[TensorSlice],
        config: "McaModelConfig",
        rank: int = 0,
        size: int = 1,
    ) -> None:
        (segment,) = self.segments(config, rank, size)
        turns = parts[0][(*(slice(None) for _ in self.dims[1:]), slice(segment.start, segment.stop))]
        gate, up = destination.chunk(2)
        gate.copy_(_transposed(turns[..., 0::2]))
        up.copy_(_transposed(turns[..., 1::2]))

    def to_hf(self, tensor: "torch.Tensor", config: "McaModelConfig") -> list["torch.Tensor"]:
        turns = tensor.new_empty(self.hf_shapes(config)[0])
        gate, up = tensor.chunk(2)
        turns[..., 0::2] = _transposed(gate)
        turns[..., 1::2] = _transposed(up)
        return [turns]


def _transposed(tensor: "torch.Tensor") -> "torch.Tensor":
    return tensor if tensor.ndim == 1 else tensor.T
