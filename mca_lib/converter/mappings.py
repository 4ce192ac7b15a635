"""Typed rows of a weight table: how tensors of one side make up a tensor of the other, in both directions.

A mapping is a list of *segments*: consecutive slices of the source tensors that, end to end along one axis, are the
Megatron tensor. Each mapping says which segments one tensor-parallel rank owns; rank 0 of 1 owns the whole tensor.
So splitting, fusing, their inverse and the shape check are one piece of code, and a new kind of weight is one method.

    Replicated   a                               every rank holds all of it
    Column       a                               axis 0 is split (output features of a column-parallel layer)
    Row          a                               axis 1 is split (input features of a row-parallel layer)
    Vocabulary   a + padding                     axis 0 is split, padded with zeros to a multiple of the ranks
    QKV          q0 q1 k0 v0 | q2 q3 k1 v1 | ... heads interleaved by key/value group, axis 0 is split
    GatedMLP     gate | up                       each half is split on its own
    Packed       z | x | B | ...                 parts of one tensor on both sides, each split and stored on its own

Placeholders of a name say how often a row exists:

    {layer}           once per layer, or per layer of `layers`
    {expert}          once per expert; split over the expert tensor parallel ranks
    {mtp}             once per multi-token prediction layer, counted from 0; {layer} goes on from the last layer then
    {source_layer}    in a hybrid: the transformer layer that {layer} has a part of

Dimensions are names of `McaModelConfig` attributes, dotted for a part (`moe.ffn_hidden_size`), or numbers. Importing
this needs no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar

from mca_lib.converter.mapping import PADDING, Mapping, Segment, Shape

if TYPE_CHECKING:
    from mca_lib.models.config import McaModelConfig

Dim = str | int


@dataclass(frozen=True)
class Replicated(Mapping):
    """The same tensor on every tensor-parallel rank."""

    dims: tuple[Dim, ...]

    def hf_shapes(self, config: "McaModelConfig") -> tuple[Shape, ...]:
        return (_sizes(config, self.dims),)

    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        yield Segment(0, 0, self.hf_shapes(config)[0][0])


@dataclass(frozen=True)
class Column(Mapping):
    """Weight or bias of a column-parallel linear layer: [output, ...], the output features are split."""

    dims: tuple[Dim, ...]

    def hf_shapes(self, config: "McaModelConfig") -> tuple[Shape, ...]:
        return (_sizes(config, self.dims),)

    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        yield Segment(0, *_share(self.hf_shapes(config)[0][0], rank, size))


@dataclass(frozen=True)
class Row(Mapping):
    """Weight of a row-parallel linear layer: [output, input], the input features are split."""

    axis: ClassVar[int] = 1
    dims: tuple[str, str]

    def hf_shapes(self, config: "McaModelConfig") -> tuple[Shape, ...]:
        return (_sizes(config, self.dims),)

    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        yield Segment(0, *_share(self.hf_shapes(config)[0][1], rank, size))


@dataclass(frozen=True)
class Vocabulary(Mapping):
    """Embedding or output layer, [vocabulary, hidden], padded so that the vocabulary divides by the ranks."""

    def hf_shapes(self, config: "McaModelConfig") -> tuple[Shape, ...]:
        return ((config.vocab_size, config.hidden_size),)

    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        start, stop = _share(padded_vocab_size(config.vocab_size, size), rank, size)
        last = config.vocab_size
        if start < last:
            yield Segment(0, start, min(stop, last))
        if stop > last:
            yield Segment(PADDING, max(start, last), stop)


@dataclass(frozen=True)
class QKV(Mapping):
    """Query, key and value projections fused: for each key/value group its query heads, its key, its value.

    With more ranks than groups Megatron still cuts the fused rows evenly, so a share may begin inside a group.
    """

    columns: tuple[str, ...]
    """Dimensions beside the rows: the hidden size, or nothing for a bias."""

    def hf_shapes(self, config: "McaModelConfig") -> tuple[Shape, ...]:
        tail = _sizes(config, self.columns)
        return ((config.query_size, *tail), (config.kv_size, *tail), (config.kv_size, *tail))

    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        begin, end = _share(config.query_size + 2 * config.kv_size, rank, size)
        head, groups = config.kv_channels, config.num_query_groups
        queries = config.query_size // groups
        position = 0
        for group in range(groups):
            for source, length in ((0, queries), (1, head), (2, head)):
                lo, hi = max(begin, position), min(end, position + length)
                if lo < hi:
                    offset = group * length - position
                    yield Segment(source, lo + offset, hi + offset)
                position += length


@dataclass(frozen=True)
class GatedMLP(Mapping):
    """Gate and up projections of a SwiGLU layer, each split on its own: [gate share; up share]."""

    dims: tuple[str, ...] = ("ffn_hidden_size", "hidden_size")
    """Of one half."""

    def hf_shapes(self, config: "McaModelConfig") -> tuple[Shape, ...]:
        return (_sizes(config, self.dims),) * 2

    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        start, stop = _share(self.hf_shapes(config)[0][0], rank, size)
        yield Segment(0, start, stop)
        yield Segment(1, start, stop)


@dataclass(frozen=True)
class Packed(Mapping):
    """Weights end to end in one tensor, here and there; a rank owns a share of each, and a checkpoint stores each."""

    parts: tuple[tuple[str, Dim], ...]
    """(Name of a part, its rows)."""
    columns: tuple[Dim, ...]
    """Dimensions beside the rows."""

    def hf_shapes(self, config: "McaModelConfig") -> tuple[Shape, ...]:
        rows, columns = _sizes(config, tuple(rows for _, rows in self.parts)), _sizes(config, self.columns)
        return ((sum(rows), *columns),)

    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        first = 0
        for rows in _sizes(config, tuple(rows for _, rows in self.parts)):
            start, stop = _share(rows, rank, size)
            yield Segment(0, first + start, first + stop)
            first += rows

    def stored_parts(self, config: "McaModelConfig") -> tuple[tuple[str, Shape], ...]:
        columns = _sizes(config, self.columns)
        return tuple((f".{name}", (*_sizes(config, (rows,)), *columns)) for name, rows in self.parts)

    def part(self, suffix: str) -> "PackedPart":
        """The tensor that a checkpoint stores under this suffix, of `stored_parts`."""
        return PackedPart(**{f.name: getattr(self, f.name) for f in fields(self)}, name=suffix.removeprefix("."))


@dataclass(frozen=True)
class PackedPart(Packed):
    """One of the weights that are packed in a tensor."""

    name: str

    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        numbers = [name for name, _ in self.parts]
        yield list(super().segments(config, rank, size))[numbers.index(self.name)]

    def stored_parts(self, config: "McaModelConfig") -> tuple[tuple[str, Shape], ...]:
        return (("", self.local_shape(config, 0, 1)),)


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Smallest multiple of `tensor_parallel` that holds the vocabulary."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel


def _share(length: int, rank: int, size: int) -> tuple[int, int]:
    if length % size:
        raise ValueError(f"{length} does not divide by {size} ranks; check_layout should have refused this")
    share = length // size
    return rank * share, (rank + 1) * share


def _sizes(config: "McaModelConfig", dims: tuple[Dim, ...]) -> Shape:
    return tuple(d if isinstance(d, int) else attrgetter(d)(config) for d in dims)
