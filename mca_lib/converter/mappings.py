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
    GatedQKV     q0 q1 g0 g1 k0 v0 | ...         QKV whose query projection holds, head by head, a query and a gate
    Packed       z | x | B | ...                 parts of a tensor of Megatron's, each split and stored on its own

Placeholders of a name say how often a row exists:

    {layer}           once per layer, or per layer of `layers`
    {expert}          once per expert; split over the expert tensor parallel ranks
    {mtp}             once per multi-token prediction layer, counted from 0; {layer} goes on from the last layer then
    {source_layer}    in a hybrid: the transformer layer that {layer} has a part of

Dimensions are names of `McaModelConfig` attributes, dotted for a part (`moe.ffn_hidden_size`), or numbers. Importing
this needs no torch.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from mca_lib.converter.mapping import PADDING, Dim, Mapping, Segment, Shape, share, sizes

if TYPE_CHECKING:
    from mca_lib.models.config import McaModelConfig


@dataclass(frozen=True)
class Replicated(Mapping):
    """The same tensor on every tensor-parallel rank."""

    dims: tuple[Dim, ...]

    def hf_shapes(self, config: "McaModelConfig") -> tuple[Shape, ...]:
        return (sizes(config, self.dims),)

    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        yield Segment(0, 0, self.hf_shapes(config)[0][0])


@dataclass(frozen=True)
class Column(Mapping):
    """Weight or bias of a column-parallel linear layer: [output, ...], the output features are split."""

    dims: tuple[Dim, ...]

    def hf_shapes(self, config: "McaModelConfig") -> tuple[Shape, ...]:
        return (sizes(config, self.dims),)

    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        yield Segment(0, *share(self.hf_shapes(config)[0][0], rank, size))


@dataclass(frozen=True)
class Row(Mapping):
    """Weight of a row-parallel linear layer: [output, input], the input features are split."""

    axis: ClassVar[int] = 1
    dims: tuple[str, str]

    def hf_shapes(self, config: "McaModelConfig") -> tuple[Shape, ...]:
        return (sizes(config, self.dims),)

    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        yield Segment(0, *share(self.hf_shapes(config)[0][1], rank, size))


@dataclass(frozen=True)
class Vocabulary(Mapping):
    """Embedding or output layer, [vocabulary, hidden], padded so that the vocabulary divides by the ranks."""

    def hf_shapes(self, config: "McaModelConfig") -> tuple[Shape, ...]:
        return ((config.vocab_size, config.hidden_size),)

    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        start, stop = share(padded_vocab_size(config.vocab_size, size), rank, size)
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
        tail = sizes(config, self.columns)
        return ((config.query_size, *tail), (config.kv_size, *tail), (config.kv_size, *tail))

    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        begin, end = share(config.query_size + 2 * config.kv_size, rank, size)
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
class GatedQKV(QKV):
    """The same where each head's query in the source's projection is followed by the gate of its output.

    Megatron has for each group its query heads, then their gates, its key and its value.
    """

    def hf_shapes(self, config: "McaModelConfig") -> tuple[Shape, ...]:
        query, *others = super().hf_shapes(config)
        return ((2 * query[0], *query[1:]), *others)

    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        begin, end = share(2 * (config.query_size + config.kv_size), rank, size)
        head, groups = config.kv_channels, config.num_query_groups
        of_group = config.num_attention_heads // groups
        position = 0
        for group in range(groups):
            heads = range(group * of_group, (group + 1) * of_group)
            starts = [(0, 2 * h * head) for h in heads] + [(0, (2 * h + 1) * head) for h in heads]
            for source, start in (*starts, (1, group * head), (2, group * head)):
                lo, hi = max(begin, position), min(end, position + head)
                if lo < hi:
                    yield Segment(source, start + lo - position, start + hi - position)
                position += head


@dataclass(frozen=True)
class GatedMLP(Mapping):
    """Gate and up projections of a SwiGLU layer, each split on its own: [gate share; up share]."""

    dims: tuple[str, ...] = ("ffn_hidden_size", "hidden_size")
    """Of one half."""

    def hf_shapes(self, config: "McaModelConfig") -> tuple[Shape, ...]:
        return (sizes(config, self.dims),) * 2

    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        start, stop = share(self.hf_shapes(config)[0][0], rank, size)
        yield Segment(0, start, stop)
        yield Segment(1, start, stop)


@dataclass(frozen=True)
class Packed(Mapping):
    """Weights end to end in one tensor of Megatron; a rank owns a share of each, and a checkpoint stores each.

    In the source they are in one tensor or several, there too end to end or, with `groups`, in turns: the first
    group's rows of each part in the tensor, then the second's.
    """

    parts: tuple[tuple[str, Dim], ...]
    """(Name of a part, its rows)."""
    columns: tuple[Dim, ...]
    """Dimensions beside the rows."""
    hf_parts: tuple[int, ...] = field(default=(), kw_only=True)
    """How many parts each tensor of the source has; empty: one has them all."""
    groups: Dim = field(default=1, kw_only=True)

    def hf_shapes(self, config: "McaModelConfig") -> tuple[Shape, ...]:
        columns = sizes(config, self.columns)
        return tuple((sum(rows), *columns) for rows in self._source_rows(config))

    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        for number in range(len(self.parts)):
            yield from self.part_segments(number, config, rank, size)

    def part_segments(self, number: int, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        """What the rank owns of one part."""
        (groups,) = sizes(config, (self.groups,))
        source = 0
        for rows in self._source_rows(config):
            if number < len(rows):
                break
            source, number = source + 1, number - len(rows)
        begin, end = share(rows[number], rank, size)
        of_group, stride, before = rows[number] // groups, sum(rows) // groups, sum(rows[:number]) // groups
        for group in range(groups):
            lo, hi = max(begin, group * of_group), min(end, (group + 1) * of_group)
            if lo < hi:
                offset = group * (stride - of_group) + before
                yield Segment(source, lo + offset, hi + offset)

    def stored_parts(self, config: "McaModelConfig") -> tuple[tuple[str, Shape], ...]:
        columns = sizes(config, self.columns)
        return tuple((f".{name}", (*sizes(config, (rows,)), *columns)) for name, rows in self.parts)

    def part(self, suffix: str) -> "PackedPart":
        """The tensor that a checkpoint stores under this suffix, of `stored_parts`."""
        names = [name for name, _ in self.parts]
        return PackedPart(self.mca, self.hf, self, names.index(suffix.removeprefix(".")))

    def _source_rows(self, config: "McaModelConfig") -> list[Shape]:
        """Rows of the parts in each tensor of the source."""
        rows = iter(sizes(config, tuple(rows for _, rows in self.parts)))
        return [tuple(itertools.islice(rows, count)) for count in self.hf_parts or (len(self.parts),)]


@dataclass(frozen=True)
class PackedPart(Mapping):
    """One of the weights that are packed in a tensor."""

    whole: Packed
    number: int

    def hf_shapes(self, config: "McaModelConfig") -> tuple[Shape, ...]:
        return self.whole.hf_shapes(config)

    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        return self.whole.part_segments(self.number, config, rank, size)


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Smallest multiple of `tensor_parallel` that holds the vocabulary."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel
