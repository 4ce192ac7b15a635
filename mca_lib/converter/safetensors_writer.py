"""Safetensors files written tensor by tensor.

The header comes first and holds every offset, so with the plan known each tensor goes straight to its place and is
forgotten; the library's `save_file` wants a whole shard (5 GB) in memory. Shards are named and indexed as
transformers does: `model.safetensors`, or `model-00001-of-00003.safetensors` and `model.safetensors.index.json`.
"""

import json
import math
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Self

import torch

from mca_lib.converter.file_tensor import Content
from mca_lib.converter.headers import INDEX_FILE, SINGLE_FILE
from mca_lib.converter.stacked import number, whole
from mca_lib.errors import ConfigError

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Slot:
    """A tensor to be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ShardedWriter:
    """Writes the tensors of `slots`, in any order and from several threads, into shards of at most `max_shard_bytes`.

    A shard is synced and closed when it is full. On exit without an error every slot must be written.

    Args:
        parts: tensors that come in parts (`stacked`) → the parts' names.
    """

    def __init__(
        self,
        directory: Path,
        slots: Mapping[str, Slot],
        max_shard_bytes: int,
        parts: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self.directory = directory
        self.slots = dict(slots)
        self.pieces = sum(len(parts.get(name, (name,))) for name in slots)
        """What is to be written one by one."""
        self.total_bytes = sum(s.bytes for s in slots.values())
        self.total_parameters = sum(math.prod(s.shape) for s in slots.values())
        names = _name_shards(_fill_shards(self.slots, max_shard_bytes))
        self._shards = {
            file: _Shard(
                directory / file,
                {n: self.slots[n] for n in held},
                {piece for n in held for piece in parts.get(n, (n,))},
            )
            for file, held in names.items()
        }
        self._file_of = {name: file for file, held in names.items() for name in held}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for shard in self._shards.values():
            shard.close()
        if kind is not None:
            return
        if missing := [n for shard in self._shards.values() for n in shard.missing]:
            raise RuntimeError(f"tensors were never written: {missing[:8]}")
        if len(self._shards) > 1:
            self._write_index()

    def write(self, name: str, content: Content) -> None:
        """Put one tensor, or a part of one, in its place: itself, or the bytes of a file that hold it.

        Raises RuntimeError when it was written before or is not what was planned.
        """
        slot, shard = self.slots[whole(name)], self._shards[self._file_of[whole(name)]]
        if number(name) is not None:
            slot = Slot(slot.shape[1:], slot.dtype)
        if isinstance(content, torch.Tensor):
            fits, found = (tuple(content.shape), content.dtype) == (slot.shape, slot.dtype), content.dtype
        else:
            found = sum(run.length for run in content)
            fits = found == slot.bytes
        if not fits:
            raise RuntimeError(f"{name}: planned {slot}, got {found}")
        with self._lock:
            if name not in shard.missing:
                raise RuntimeError(f"{name}: written twice")
            shard.missing.discard(name)
            shard.open()
        shard.write(whole(name), content, offset=slot.bytes * (number(name) or 0))
        with self._lock:
            shard.unfinished.discard(name)
            full = not shard.unfinished
        if full:
            shard.close()

    def _write_index(self) -> None:
        index = {
            "metadata": {"total_parameters": self.total_parameters, "total_size": self.total_bytes},
            "weight_map": dict(sorted(self._file_of.items())),
        }
        (self.directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class _Shard:
    """One safetensors file: its header first, then the tensors wherever they belong."""

    def __init__(self, path: Path, slots: Mapping[str, Slot], pieces: set[str]) -> None:
        self.path = path
        self.missing, self.unfinished = set(pieces), set(pieces)
        self._descriptor = -1
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts, position = {}, 0
        for name, slot in slots.items():
            starts[name], end = position, position + slot.bytes
            header[name] = {"dtype": _NAMES[slot.dtype], "shape": list(slot.shape), "data_offsets": [position, end]}
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = struct.pack("<Q", len(text)) + text
        self._start = {name: len(self._header) + start for name, start in starts.items()}
        self._bytes = len(self._header) + position

    def open(self) -> None:
        """Make the file, with its header and all the room that it needs."""
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            os.posix_fallocate(self._descriptor, 0, self._bytes)  # a full disk shows here, not after hours
            _write_at(self._descriptor, memoryview(self._header), 0)

    def write(self, name: str, content: Content, offset: int) -> None:
        """`offset`: bytes of the tensor before what is written."""
        position = self._start[name] + offset
        if isinstance(content, torch.Tensor):
            # uint8, because numpy has no bfloat16
            data = memoryview(content.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
            _write_at(self._descriptor, data, position)
            return
        for run in content:
            run.copy_to(self._descriptor, position)
            position += run.length

    def close(self) -> None:
        if self._descriptor >= 0:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def parse_size(text: str) -> int:
    """Bytes of a size such as `5GB` (decimal units, as transformers reads them)."""
    try:
        size = int(float(text[:-2]) * _UNITS[text[-2:]])
    except (KeyError, ValueError, OverflowError):  # the last is int's of an infinity
        size = 0
    if size < 1:
        raise ConfigError(f"max_shard_size={text!r} is no size; write it as 5GB, 500MB or 100KB")
    return size


def _fill_shards(slots: Mapping[str, Slot], max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, slot in slots.items():
        if shards[-1] and size + slot.bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += slot.bytes
    return shards


def _name_shards(shards: list[list[str]]) -> dict[str, list[str]]:
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, 1)}
