"""Writes a torch_dist checkpoint tensor by tensor, in one process, without Megatron and without a model.

The list of tensors comes first: names, shapes and dtypes. Each tensor is then asked for, written and forgotten. The
result is what `megatron.core.dist_checkpointing.save` writes (megatron-core 0.19.2), and loads at any layout:

    __0_0.distcp __0_1.distcp    one file per worker, tensors end to end, each as `torch.save` writes it
    .metadata                    torch's table of contents: key → shape, pieces, places in the files
    metadata.json                Megatron's mark of a whole checkpoint, written last

torch's own FileSystemWriter keeps the last tensor of every key until a file is closed and loses the errors of its
threads (torch 2.15); only its table of contents is used.
"""

import io
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO

import torch
from torch.distributed.checkpoint import FileSystemWriter, SavePlan
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

_COMMON_STATE = "common_state/shard_0_1"
"""Megatron's key for what is no tensor; a model has nothing of the kind."""

SYNC_BYTES = 256 << 20
"""A file is sent to the disk each time that it has grown by so much, while the next tensors are made."""


@dataclass(frozen=True)
class Piece:
    """One tensor of the model: an element of the leading axes (layers, experts) of a stored key."""

    name: str
    key: str
    index: tuple[int, ...]
    """On the leading axes of the key."""
    key_shape: tuple[int, ...]
    """Of the whole key."""
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this tensor, without the leading axes."""
        return self.key_shape[len(self.index) :]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def write_item(self) -> WriteItem:
        """The piece as torch's checkpoints describe it."""
        rank = len(self.shape)
        offsets = torch.Size([*self.index, *[0] * rank])
        sizes = torch.Size([*[1] * len(self.index), *self.shape])
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, sizes),
            properties=TensorProperties(dtype=self.dtype),
            size=torch.Size(self.key_shape),
        )
        return WriteItem(MetadataIndex(self.key, offsets), WriteItemType.SHARD, tensor_data=data)


def write_checkpoint(
    directory: Path,
    pieces: Sequence[Piece],
    make: Callable[[Piece], torch.Tensor],
    *,
    workers: int = 1,
    written: Callable[[Piece, torch.Tensor], None] = lambda piece, tensor: None,
) -> None:
    """Write `pieces`, each made when its turn comes.

    Args:
        directory: absent or empty.
        make: gives the tensor of a piece, contiguous on the CPU; it may be overwritten once the worker asks for the
            next. Called by the worker threads.
        written: called after each piece, by the worker threads.

    Raises:
        ValueError: the pieces do not cover each key exactly, or a tensor is not what its piece says.
    """
    metadata = _table_of_contents(pieces)
    directory.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()

    def work(number: int, share: list[Piece]) -> list[WriteResult]:
        try:
            with (directory / f"__0_{number}.distcp").open("wb") as file:
                results = [_write_common(file)] if number == 0 else []
                synced = 0
                for piece in share:
                    if stop.is_set():
                        break
                    tensor = make(piece)
                    results.append(_write(file, piece, tensor))
                    written(piece, tensor)
                    if file.tell() - synced > SYNC_BYTES:
                        synced = file.tell()
                        file.flush()
                        os.fdatasync(file.fileno())
                file.flush()
                os.fsync(file.fileno())
            return results
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(workers) as pool:
        jobs = [pool.submit(work, i, share) for i, share in enumerate(_shares(pieces, workers))]
        wait(jobs, return_when=FIRST_EXCEPTION)
        failures = [e for job in jobs if (e := job.exception()) is not None]
        if failures:
            raise failures[0]
        results = [job.result() for job in jobs]
    if sum(map(len, results)) != len(pieces) + 1:
        raise RuntimeError(f"{sum(map(len, results)) - 1} of {len(pieces)} tensors were written")
    FileSystemWriter(directory).finish(metadata, results)
    mark = directory / "metadata.json"
    mark.write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}), encoding="utf-8")


def _table_of_contents(pieces: Sequence[Piece]) -> Metadata:
    """torch checks it: pieces of a key overlap nowhere and fill it."""
    items = [WriteItem(MetadataIndex(_COMMON_STATE), WriteItemType.BYTE_IO)]
    items += [piece.write_item() for piece in pieces]
    filled: dict[str, int] = {}
    for piece in pieces:
        filled[piece.key] = filled.get(piece.key, 0) + prod(piece.shape)
    for piece in pieces:
        if filled[piece.key] != prod(piece.key_shape):
            raise ValueError(f"{piece.key}: pieces of {filled[piece.key]} elements for {prod(piece.key_shape)}")
    if len({(p.key, p.index) for p in pieces}) != len(pieces):
        raise ValueError("two pieces are the same part of a key")
    return create_default_global_save_plan([SavePlan(items)])[1]


def _shares(pieces: Sequence[Piece], workers: int) -> list[list[Piece]]:
    """One list per worker, about equal in bytes and in the order of the pieces; the same at every run."""
    shares: list[list[Piece]] = [[] for _ in range(workers)]
    sizes = [0] * workers
    for piece in pieces:
        least = sizes.index(min(sizes))
        shares[least].append(piece)
        sizes[least] += piece.bytes
    return shares


def _write(file: IO[bytes], piece: Piece, tensor: torch.Tensor) -> WriteResult:
    if tuple(tensor.shape) != piece.shape or tensor.dtype != piece.dtype or not tensor.is_contiguous():
        raise ValueError(f"{piece.name}: planned {piece.dtype} {piece.shape}, got {tensor.dtype} {tuple(tensor.shape)}")
    item = piece.write_item()
    start = file.tell()
    # `torch.save` writes all of the storage; a piece of a larger one is given a storage of its own.
    bytes_of = tensor.view(-1).view(torch.uint8).numpy()
    own = torch.frombuffer(memoryview(bytes_of), dtype=piece.dtype).view(item.tensor_data.chunk.sizes)
    torch.save(own, file)
    return _result(item, file, start)


def _write_common(file: IO[bytes]) -> WriteResult:
    buffer = io.BytesIO()
    torch.save([{}], buffer)  # as Megatron's ShardedObject: a list of the parts, each the state of one
    start = file.tell()
    file.write(buffer.getbuffer())
    return _result(WriteItem(MetadataIndex(_COMMON_STATE), WriteItemType.BYTE_IO), file, start)


def _result(item: WriteItem, file: IO[bytes], start: int) -> WriteResult:
    length = file.tell() - start
    return WriteResult(item.index, length, _StorageInfo(Path(file.name).name, start, length))
