"""Random access to the tensors of a torch_dist checkpoint: one at a time, in one process, without Megatron.

`dist_checkpointing.load` fills a model, collectively. Digests and exports want the opposite: whole tensors by name,
whatever layout wrote them, with one in memory. Layers and experts are leading axes of a stored tensor; `read` takes the
names with both written out. Threads may share a reader.
"""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from mca_lib.converter.file_tensor import FileTensor, ReadCounter
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


class CheckpointReader:
    """Tensors of a torch_dist checkpoint by name.

    Raises CheckpointError on construction when the directory is no whole checkpoint, and on reading when a file is
    damaged.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not (self.directory / "metadata.json").is_file():
            raise CheckpointError(f"{self.directory}: not a whole checkpoint: metadata.json is missing")
        self._files: dict[str, IO[bytes]] = {}
        self._lock = threading.Lock()
        self._counter = ReadCounter()
        try:
            self._metadata: Metadata = FileSystemReader(self.directory).read_metadata()
        except Exception as e:
            raise CheckpointError(f"{self.directory}: unreadable metadata ({type(e).__name__}: {e})") from e
        self._check_files()
        self.stored: dict[str, TensorStorageMetadata] = {
            key: value
            for key, value in self._metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }

    def __iter__(self) -> Iterator[StoredTensor]:
        """Every tensor of the model, layer by layer, sorted by name."""
        tensors = [
            StoredTensor(name, shape, meta.properties.dtype)
            for key, meta in self.stored.items()
            for name, _, shape in written_out(key, tuple(meta.size))
        ]
        return iter(sorted(tensors, key=lambda t: t.name))

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
        box, items = self._pieces(key, index)
        if sum(item.lengths.numel() for item in items) != destination.numel():
            raise CheckpointError(f"{self.directory}: {name} is stored only in part")
        whole = destination.view(box.sizes)
        try:
            for item in items:
                target = whole
                for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                    target = target.narrow(dim, offset, length)
                pairs = zip(item.storage_offsets, item.lengths, strict=True)
                self._stored_piece(item.storage_index).read_into(
                    target, tuple(slice(start, start + length) for start, length in pairs)
                )
        except Exception as e:
            raise CheckpointError(f"{self.directory}: {name} cannot be read ({type(e).__name__}: {e})") from e

    def in_one_piece(self, name: str) -> FileTensor | None:
        """The whole tensor as it lies in a file; None when it is stored in several pieces."""
        key, index = self._find(name)
        box, items = self._pieces(key, index)
        piece = self._stored_piece(items[0].storage_index) if len(items) == 1 else None
        if piece is None or piece.shape != tuple(box.sizes):
            return None
        return replace(piece, shape=piece.shape[len(index) :])

    def _pieces(self, key: str, index: tuple[int, ...]) -> tuple[ChunkStorageMetadata, list[ReadItem]]:
        """(Extent of a tensor within its key, what to read for it)."""
        shape = list(self.stored[key].size)
        box = ChunkStorageMetadata(
            offsets=torch.Size([*index, *[0] * (len(shape) - len(index))]),
            sizes=torch.Size([*[1] * len(index), *shape[len(index) :]]),
        )
        return box, create_read_items_for_chunk_list(key, self.stored[key], [box])

    def _stored_piece(self, index: MetadataIndex) -> FileTensor:
        """A piece as it lies in its file, found by what `torch.save` wrote before it; no weights are read."""
        info = self._metadata.storage_data[index]
        with self._lock:
            if info.relative_path not in self._files:
                self._files[info.relative_path] = (self.directory / info.relative_path).open("rb", buffering=0)
            file = self._files[info.relative_path]
            view = _create_file_view(file, info.offset, info.length)
            tensor = torch.load(view, weights_only=True, map_location="meta")
        if not tensor.is_contiguous():
            raise ValueError("it is not stored in the order of its elements")
        start = info.offset + tensor.untyped_storage()._checkpoint_offset
        start += tensor.storage_offset() * tensor.dtype.itemsize
        return FileTensor(file, Path(file.name), start, tuple(tensor.shape), tensor.dtype, self._counter)

    def _find(self, name: str) -> tuple[str, tuple[int, ...]]:
        for stacked_layers in (True, False):
            key, index = stored_key(name, stacked_layers)
            if key in self.stored:
                return key, index
        raise CheckpointError(f"{self.directory}: no tensor {name}")

    def _check_files(self) -> None:
        """Every stored piece lies within its file."""
        ends: dict[str, int] = {}
        for info in self._metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for file, end in ends.items():
            path = self.directory / file
            size = os.path.getsize(path) if path.is_file() else -1
            if size < end:
                state = "is missing" if size < 0 else f"has {size} bytes of {end}"
                raise CheckpointError(f"{path}: damaged checkpoint: the file {state}")
