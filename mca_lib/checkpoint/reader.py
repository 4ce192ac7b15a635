"""Random access to the tensors of a torch_dist checkpoint: one at a time, in one process, without Megatron.

`dist_checkpointing.load` fills a model, collectively. Digests and exports want the opposite: whole tensors by name,
whatever layout wrote them, with one in memory. Layers and experts are leading axes of a stored tensor; `read` takes the
names with both written out. Threads may share a reader.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from mca_lib.checkpoint.pieces import StoredPieces
from mca_lib.converter.file_tensor import FileTensor
from mca_lib.errors import CheckpointError
from mca_lib.models.naming import stored_key, written_out


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the model, as stored: shape without the layer axis."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class CheckpointReader(StoredPieces):
    """Tensors of a torch_dist checkpoint by name.

    Raises CheckpointError on construction when the directory is no whole checkpoint, and on reading when a file is
    damaged.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not (self.directory / "metadata.json").is_file():
            raise CheckpointError(f"{self.directory}: not a whole checkpoint: metadata.json is missing")
        super().__init__(directory)

    def __iter__(self) -> Iterator[StoredTensor]:
        """Every tensor of the model, layer by layer, sorted by name."""
        tensors = [
            StoredTensor(name, shape, meta.properties.dtype)
            for key, meta in self.stored.items()
            for name, _, shape in written_out(key, tuple(meta.size))
        ]
        return iter(sorted(tensors, key=lambda t: t.name))

    @property
    def keys(self) -> Collection[str]:
        """Everything that is stored, what is no tensor too."""
        return self._metadata.state_dict_metadata.keys()

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor. Raises CheckpointError when it is not there or its file is damaged."""
        key, index = self._find(name)
        meta = self.stored[key]
        value = torch.empty(meta.size[len(index) :], dtype=meta.properties.dtype)
        self.read_into(name, value)
        return value

    def read_into(self, name: str, destination: torch.Tensor) -> None:
        """The whole tensor, into a contiguous CPU tensor of its shape and dtype."""
        key, index = self._find(name)
        meta = self.stored[key]
        shape = list(meta.size)[len(index) :]
        if list(destination.shape) != shape or destination.dtype != meta.properties.dtype:
            raise ValueError(f"{name} is {meta.properties.dtype} {shape}, not {destination.dtype}")
        self.read_box(key, self._start(key, index), destination.view((*[1] * len(index), *shape)))

    def in_one_piece(self, name: str) -> FileTensor | None:
        """The whole tensor as it lies in a file; None when it is stored in several pieces."""
        key, index = self._find(name)
        sizes = (*[1] * len(index), *self.stored[key].size[len(index) :])
        items = self.box_items(key, self._start(key, index), sizes)
        piece = self.piece(items[0].storage_index) if len(items) == 1 else None
        if piece is None or piece.shape != sizes:
            return None
        return replace(piece, shape=piece.shape[len(index) :])

    def _start(self, key: str, index: tuple[int, ...]) -> tuple[int, ...]:
        """Where a tensor begins within its key."""
        return (*index, *[0] * (len(self.stored[key].size) - len(index)))

    def _find(self, name: str) -> tuple[str, tuple[int, ...]]:
        for stacked_layers in (True, False):
            key, index = stored_key(name, stacked_layers)
            if key in self.stored:
                return key, index
        raise CheckpointError(f"{self.directory}: no tensor {name}")
