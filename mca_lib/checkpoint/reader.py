"""Random access to the tensors of a torch_dist checkpoint: one at a time, in one process, without Megatron.

`dist_checkpointing.load` fills a model, collectively. Digests and exports want the opposite: whole tensors by name,
whatever layout wrote them, with one in memory. Layers and experts are leading axes of a stored tensor; `read` takes the
names with both written out.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mca_lib.errors import CheckpointError
from mca_lib.models.naming import stored_key, written_out


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the model, as stored: shape without the layer axis."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class CheckpointReader:
    """Tensors of a torch_dist checkpoint by name.

    Raises CheckpointError on construction when the directory is no whole checkpoint, and on reading when a file is
    damaged.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not (self.directory / "metadata.json").is_file():
            raise CheckpointError(f"{self.directory}: not a whole checkpoint: metadata.json is missing")
        self._storage = FileSystemReader(self.directory)
        try:
            self._metadata: Metadata = self._storage.read_metadata()
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
        shape = list(meta.size)
        box = ChunkStorageMetadata(
            offsets=torch.Size([*index, *[0] * (len(shape) - len(index))]),
            sizes=torch.Size([*[1] * len(index), *shape[len(index) :]]),
        )
        value = torch.empty(box.sizes, dtype=meta.properties.dtype)
        items = create_read_items_for_chunk_list(key, meta, [box])
        if sum(item.lengths.numel() for item in items) != value.numel():
            raise CheckpointError(f"{self.directory}: {name} is stored only in part")
        try:
            self._storage.set_up_storage_reader(self._metadata, is_coordinator=True)
            self._storage.read_data(self._storage.prepare_local_plan(LoadPlan(items)), _InPlace(value)).wait()
        except Exception as e:
            raise CheckpointError(f"{self.directory}: {name} cannot be read ({type(e).__name__}: {e})") from e
        return value.view(shape[len(index) :])

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


class _InPlace(LoadPlanner):
    """Reads into one tensor that stands for the requested box."""

    def __init__(self, target: torch.Tensor) -> None:
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self.target
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: object) -> None:
        raise NotImplementedError("only tensors are read")

    def set_up_planner(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError("the plan is made by CheckpointReader")

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError("the plan is made by CheckpointReader")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan
