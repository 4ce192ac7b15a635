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
from torch.serialization import skip_data

from mca_lib.converter.file_tensor import Content, FileTensor, ReadCounter

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

    @property
    def box(self) -> torch.Size:
        """Its extent within the key."""
        return torch.Size([*[1] * len(self.index), *self.shape])

    def write_item(self) -> WriteItem:
        """The piece as torch's checkpoints describe it."""
        offsets = torch.Size([*self.index, *[0] * len(self.shape)])
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, self.box),
            properties=TensorProperties(dtype=self.dtype),
            size=torch.Size(self.key_shape),
        )
        return WriteItem(MetadataIndex(self.key, offsets), WriteItemType.SHARD, tensor_data=data)


def write_checkpoint(
    directory: Path,
    pieces: Sequence[Piece],
    make: Callable[[Piece], Content],
    *,
    workers: int = 1,
    written: Callable[[Piece, FileTensor], None] = lambda piece, stored: None,
) -> None:
    """Write `pieces`, each made when its turn comes.

    Args:
        directory: absent or empty.
        make: gives the content of a piece: a contiguous CPU tensor, which may be overwritten once the worker asks for
            the next, or bytes of other files. Called by the worker threads.
        written: called after each piece with what lies in the file, by the worker threads.

    Raises:
        ValueError: the pieces do not cover each key exactly, or a tensor is not what its piece says.
    """
    metadata = _table_of_contents(pieces)
    directory.mkdir(parents=True, exist_ok=True)
    envelopes = {(p.box, p.dtype): _envelope(directory, p.box, p.dtype) for p in pieces}
    stop = threading.Event()

    def work(number: int, share: list[Piece]) -> list[WriteResult]:
        try:
            path = directory / f"__0_{number}.distcp"
            with path.open("w+b", buffering=0) as file:
                results = [_write_common(file)] if number == 0 else []
                synced = 0
                for piece in share:
                    if stop.is_set():
                        break
                    result, stored = _write(file, path, piece, make(piece), envelopes[piece.box, piece.dtype])
                    results.append(result)
                    written(piece, stored)
                    if file.tell() - synced > SYNC_BYTES:
                        synced = file.tell()
                        os.fdatasync(file.fileno())
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


@dataclass(frozen=True)
class _Envelope:
    """What `torch.save` writes before and after the elements of a tensor of one shape and dtype."""

    before: bytes
    after: bytes


def _envelope(directory: Path, shape: torch.Size, dtype: torch.dtype) -> _Envelope:
    """Found by saving such a tensor without its elements; tensor and archive are files that are all hole."""
    holes, path = directory / "holes", directory / "archive"
    count = prod(shape)
    tensor = torch.from_file(str(holes), shared=True, size=count, dtype=dtype).view(shape)
    with skip_data():
        torch.save(tensor, path)
    holes.unlink()
    start = torch.load(path, weights_only=True, map_location="meta").untyped_storage()._checkpoint_offset
    with path.open("rb") as file:
        before = file.read(start)
        file.seek(start + count * dtype.itemsize)
        after = file.read()
    path.unlink()
    return _Envelope(before, after)


def _write(
    file: IO[bytes], path: Path, piece: Piece, content: Content, envelope: _Envelope
) -> tuple[WriteResult, FileTensor]:
    """(What torch's table of contents needs, the tensor as it lies in the file now)."""
    start = file.tell()
    file.write(envelope.before)
    stored = FileTensor(file, path, file.tell(), piece.shape, piece.dtype, ReadCounter())
    if isinstance(content, torch.Tensor):
        if (tuple(content.shape), content.dtype) != (piece.shape, piece.dtype) or not content.is_contiguous():
            found = f"{content.dtype} {tuple(content.shape)}"
            raise ValueError(f"{piece.name}: planned {piece.dtype} {piece.shape}, got {found}")
        _write_all(file, memoryview(content.view(-1).view(torch.uint8).numpy()))
    else:
        if (length := sum(run.length for run in content)) != piece.bytes:
            raise ValueError(f"{piece.name}: planned {piece.bytes} bytes, got {length}")
        for run in content:
            run.copy_to(file.fileno(), file.tell())
            file.seek(run.length, os.SEEK_CUR)
    _write_all(file, memoryview(envelope.after))
    return _result(piece.write_item(), file, start), stored


def _write_all(file: IO[bytes], data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += file.write(data[done:])


def _write_common(file: IO[bytes]) -> WriteResult:
    buffer = io.BytesIO()
    torch.save([{}], buffer)  # as Megatron's ShardedObject: a list of the parts, each the state of one
    start = file.tell()
    _write_all(file, buffer.getbuffer())
    return _result(WriteItem(MetadataIndex(_COMMON_STATE), WriteItemType.BYTE_IO), file, start)


def _result(item: WriteItem, file: IO[bytes], start: int) -> WriteResult:
    length = file.tell() - start
    return WriteResult(item.index, length, _StorageInfo(Path(file.name).name, start, length))
