"""What a row of a weight table can do, whatever its kind: `mappings` has the kinds, and says what they are.

A mapping is a list of *segments*: consecutive slices of the source tensors that, end to end along one axis, are the
Megatron tensor. Splitting, fusing, their inverse and the shape check follow from them. Importing this needs no torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from mca_lib.converter.file_tensor import FileTensor, Run
    from mca_lib.models.config import McaModelConfig

Shape = tuple[int, ...]
Dim = str | int
"""Name of an attribute of the config, dotted for a part, or a number."""


def share(length: int, rank: int, size: int) -> tuple[int, int]:
    """(start, stop) of a rank's equal share."""
    if length % size:
        raise ValueError(f"{length} does not divide by {size} ranks; check_layout should have refused this")
    part = length // size
    return rank * part, (rank + 1) * part


def sizes(config: "McaModelConfig", dims: tuple[Dim, ...]) -> Shape:
    """What dimensions are for a config."""
    return tuple(d if isinstance(d, int) else attrgetter(d)(config) for d in dims)


class TensorSlice(Protocol):
    """A tensor, possibly still on disk, that gives parts of itself: a `torch.Tensor`, or one in a file.

    One in a file also has `read_into(destination, index)`, which makes no tensor of its own.
    """

    dtype: "torch.dtype"

    def __getitem__(self, index: object) -> "torch.Tensor": ...


class Segment(NamedTuple):
    """Elements `start:stop` of source tensor number `source`, along the mapping's axis; source -1 is zeros."""

    source: int
    start: int
    stop: int


PADDING = -1


class TensorPlace(NamedTuple):
    """Where a rank stands in its tensor parallel group, and in that of its experts."""

    rank: int = 0
    size: int = 1
    expert_rank: int = 0
    expert_size: int = 1

    def of(self, mapping: "Mapping") -> tuple[int, int]:
        """(rank, size) of the group that splits the mapping's tensor."""
        return (self.expert_rank, self.expert_size) if mapping.per_expert else (self.rank, self.size)


@dataclass(frozen=True)
class Mapping(ABC):
    """One tensor of Megatron ⇄ one or more tensors of Hugging Face."""

    axis: ClassVar[int] = 0
    """The axis along which segments lie."""

    mca: str
    """Name in the checkpoint."""
    hf: tuple[str, ...]
    """Names on the other side; a single one may be given as a string."""
    when: str | None = field(default=None, kw_only=True)
    """Attribute of the config that must be true for the row to exist."""
    layers: str | None = field(default=None, kw_only=True)
    """Attribute of the config that numbers the layers that have the row; None: all."""

    def __post_init__(self) -> None:
        if isinstance(self.hf, str):
            object.__setattr__(self, "hf", (self.hf,))

    @abstractmethod
    def hf_shapes(self, config: "McaModelConfig") -> tuple[Shape, ...]:
        """Shapes of the Hugging Face tensors, in the order of `hf`."""

    @abstractmethod
    def segments(self, config: "McaModelConfig", rank: int, size: int) -> Iterator[Segment]:
        """What rank `rank` of `size` tensor-parallel ranks owns, in the order of its tensor."""

    def local_shape(self, config: "McaModelConfig", rank: int, size: int) -> Shape:
        """Shape of the tensor that the rank owns."""
        length = sum(s.stop - s.start for s in self.segments(config, rank, size))
        shape = list(self.hf_shapes(config)[0])
        shape[self.axis] = length
        return tuple(shape)

    @property
    def per_expert(self) -> bool:
        """Is there one such tensor for every expert?"""
        return "{expert}" in self.mca

    def stored_parts(self, config: "McaModelConfig") -> tuple[tuple[str, Shape], ...]:
        """(what its key adds to the tensor's name, shape) of every tensor that a checkpoint stores for this one.

        They are the tensor, end to end along axis 0.
        """
        return (("", self.local_shape(config, 0, 1)),)

    def indices(self, config: "McaModelConfig") -> Iterator[dict[str, int]]:
        """What the placeholders of the names stand for, once for every tensor of this row."""
        for outer in self._layer_indices(config):
            if self.per_expert:
                yield from ({**outer, "expert": expert} for expert in range(config.moe.num_experts))
            else:
                yield outer

    def _layer_indices(self, config: "McaModelConfig") -> Iterator[dict[str, int]]:
        if "{mtp}" in self.mca:
            yield from ({"mtp": i, "layer": config.num_layers + i} for i in range(config.mtp_num_layers))
        elif "{layer}" in self.mca:
            layers = range(config.num_layers) if self.layers is None else attrgetter(self.layers)(config)
            source = {} if config.hybrid is None else config.layer_map.transformer_layer
            yield from ({"layer": i, "source_layer": source.get(i, i)} for i in layers)
        else:
            yield {}

    def to_mca(
        self, parts: Sequence[TensorSlice], config: "McaModelConfig", rank: int = 0, size: int = 1
    ) -> "torch.Tensor":
        """The rank's Megatron tensor, reading of `parts` only what it owns."""
        import torch

        value = torch.empty(self.local_shape(config, rank, size), dtype=parts[0].dtype)
        self.fill(value, parts, config, rank, size)
        return value

    def fill(
        self,
        destination: "torch.Tensor",
        parts: Sequence[TensorSlice],
        config: "McaModelConfig",
        rank: int = 0,
        size: int = 1,
    ) -> None:
        """Fill a CPU tensor of `local_shape` and the dtype of the parts, reading of them only what the rank owns."""
        lead = (slice(None),) * self.axis
        position = 0
        for source, start, stop in self.segments(config, rank, size):
            target = destination.narrow(self.axis, position, stop - start)
            index = (*lead, slice(start, stop))
            if source == PADDING:
                target.zero_()
            elif hasattr(parts[source], "read_into"):
                parts[source].read_into(target, index)
            else:
                target.copy_(parts[source][index])
            position += stop - start

    def runs(self, parts: Sequence[TensorSlice], config: "McaModelConfig") -> "list[Run] | None":
        """The whole Megatron tensor as bytes of the files that hold `parts`; None where it is more than such bytes."""
        segments = list(self.segments(config, 0, 1))
        if self.axis and len(segments) > 1:
            return None
        lead = (slice(None),) * self.axis
        runs: list[Run] = []
        for source, start, stop in segments:
            if source == PADDING or not hasattr(parts[source], "runs"):
                return None
            runs += parts[source].runs((*lead, slice(start, stop)))
        return runs

    def hf_runs(self, tensor: "FileTensor", config: "McaModelConfig") -> "list[list[Run]] | None":
        """The Hugging Face tensors as bytes of the file that holds the whole Megatron tensor; None as for `runs`."""
        segments = list(self.segments(config, 0, 1))
        if self.axis and len(segments) > 1:
            return None
        lead = (slice(None),) * self.axis
        pieces: list[list[tuple[int, list[Run]]]] = [[] for _ in self.hf]
        position = 0
        for source, start, stop in segments:
            if source == PADDING:
                return None
            length = stop - start
            pieces[source].append((start, tensor.runs((*lead, slice(position, position + length)))))
            position += length
        return [[run for _, runs in sorted(found, key=itemgetter(0)) for run in runs] for found in pieces]

    def to_hf(self, tensor: "torch.Tensor", config: "McaModelConfig") -> list["torch.Tensor"]:
        """The whole Megatron tensor back into the Hugging Face tensors; padding is dropped.

        What lies in one piece is a view of `tensor`, the rest a copy.
        """
        pieces: list[list[tuple[int, torch.Tensor]]] = [[] for _ in self.hf]
        position = 0
        for source, start, stop in self.segments(config, 0, 1):
            if source != PADDING:
                pieces[source].append((start, tensor.narrow(self.axis, position, stop - start)))
            position += stop - start
        outputs = []
        for shape, found in zip(self.hf_shapes(config), pieces, strict=True):
            if len(found) == 1:
                outputs.append(found[0][1])
                continue
            whole = tensor.new_empty(shape)
            for start, piece in found:
                whole.narrow(self.axis, start, piece.shape[self.axis]).copy_(piece)
            outputs.append(whole)
        return outputs
