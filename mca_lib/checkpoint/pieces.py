"""The files of a checkpoint that torch.distributed.checkpoint wrote, read piece by piece in one process.

A stored tensor is a set of pieces, one or more per rank that wrote it. A request is a box of a stored tensor; what is
read are the bytes of the pieces that lie in it, and no others. Threads may share the object.
"""

import io
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from mca_lib.converter.file_tensor import FileTensor, ReadCounter
from mca_lib.errors import CheckpointError


class StoredPieces:
    """Tensors and objects of a checkpoint directory, by key.

    Raises CheckpointError on construction when the metadata is unreadable or a file is missing or too short, and on
    reading when a file is damaged.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._files: dict[str, IO[bytes]] = {}
        self._lock = threading.Lock()
        self._counter = ReadCounter()
        try:
            self._metadata: Metadata = FileSystemReader(self.directory).read_metadata()
        except Exception as e:
            raise CheckpointError(f"{self.directory}: unreadable metadata ({type(e).__name__}: {e})") from e
        self._check_files()
        stored = self._metadata.state_dict_metadata.items()
        self.stored: dict[str, TensorStorageMetadata] = {
            k: v for k, v in stored if isinstance(v, TensorStorageMetadata)
        }
        self.objects: tuple[str, ...] = tuple(k for k, v in stored if isinstance(v, BytesStorageMetadata))

    @property
    def bytes_read(self) -> int:
        """Of tensors, until now."""
        return self._counter.bytes

    def read_box(self, key: str, offsets: Sequence[int], destination: torch.Tensor) -> None:
        """The elements from `offsets` on, into a contiguous CPU tensor of the stored dtype and as many axes."""
        items = self.box_items(key, offsets, destination.shape)
        if sum(item.lengths.numel() for item in items) != destination.numel():
            raise CheckpointError(f"{self.directory}: {key} is stored only in part")
        try:
            for item in items:
                target = destination
                for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                    target = target.narrow(dim, offset, length)
                pairs = zip(item.storage_offsets, item.lengths, strict=True)
                self.piece(item.storage_index).read_into(
                    target, tuple(slice(start, start + length) for start, length in pairs)
                )
        except Exception as e:
            raise CheckpointError(f"{self.directory}: {key} cannot be read ({type(e).__name__}: {e})") from e

    def box_items(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> list[ReadItem]:
        """What is to be read for a box of a stored tensor."""
        box = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        return create_read_items_for_chunk_list(key, self.stored[key], [box])

    def piece(self, index: MetadataIndex) -> FileTensor:
        """A piece as it lies in its file, found by what `torch.save` wrote before it; no weights are read."""
        info = self._metadata.storage_data[index]
        with self._lock:
            file = self._open(info.relative_path)
            view = _create_file_view(file, info.offset, info.length)
            tensor = torch.load(view, weights_only=True, map_location="meta")
        if not tensor.is_contiguous():
            raise ValueError("it is not stored in the order of its elements")
        start = info.offset + tensor.untyped_storage()._checkpoint_offset
        start += tensor.storage_offset() * tensor.dtype.itemsize
        return FileTensor(file, Path(file.name), start, tuple(tensor.shape), tensor.dtype, self._counter)

    def read_object(self, key: str) -> Any:
        """A number, text or other plain object; code of whoever wrote it is refused, not run."""
        info = self._metadata.storage_data[MetadataIndex(key)]
        try:
            with self._lock:
                data = os.pread(self._open(info.relative_path).fileno(), info.length, info.offset)
            return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        except Exception as e:
            raise CheckpointError(
                f"{self.directory}: {key} cannot be read ({type(e).__name__}: {str(e).splitlines()[0]})"
            ) from e

    def _open(self, path: str) -> IO[bytes]:
        if path not in self._files:
            self._files[path] = (self.directory / path).open("rb", buffering=0)
        return self._files[path]

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
