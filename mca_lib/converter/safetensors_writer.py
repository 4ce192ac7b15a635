"""Safetensors files written tensor by tensor.

The header comes first and holds every offset, so with the plan known each tensor goes straight to its place and is
forgotten; the library's `save_file` wants a whole shard (5 GB) in memory. Shards are named and indexed as
transformers does: `model.safetensors`, or `model-00001-of-00003.safetensors` and `model.safetensors.index.json`.
"""

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import torch

from mca_lib.converter.headers import INDEX_FILE, SINGLE_FILE
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
    """Writes the tensors of `slots`, in any order, into shards of at most `max_shard_bytes`.

    A shard is closed when it is full, in the order of `slots`. On exit without an error every slot must be written.
    """

    def __init__(self, directory: Path, slots: Mapping[str, Slot], max_shard_bytes: int) -> None:
        self.directory = directory
        self.slots = dict(slots)
        self.total_bytes = sum(s.bytes for s in slots.values())
        self.total_parameters = sum(math.prod(s.shape) for s in slots.values())
        self._files = _name_shards(_fill_shards(self.slots, max_shard_bytes))
        self._file_of = {name: file for file, names in self._files.items() for name in names}
        self._offset: dict[str, int] = {}
        self._missing = {file: set(names) for file, names in self._files.items()}
        self._streams: dict[str, IO[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for stream in self._streams.values():
            stream.close()
        if kind is not None:
            return
        if missing := [n for names in self._missing.values() for n in names]:
            raise RuntimeError(f"tensors were never written: {missing[:8]}")
        if len(self._files) > 1:
            self._write_index()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put one tensor in its place. Raises RuntimeError when it was written before or is not what was planned."""
        slot, file = self.slots[name], self._file_of[name]
        if tuple(tensor.shape) != slot.shape or tensor.dtype != slot.dtype:
            raise RuntimeError(f"{name}: planned {slot}, got {tuple(tensor.shape)} {tensor.dtype}")
        if name not in self._missing[file]:
            raise RuntimeError(f"{name}: written twice")
        stream = self._stream(file)
        stream.seek(self._offset[name])
        # uint8, because numpy has no bfloat16
        stream.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        self._missing[file].discard(name)
        if not self._missing[file]:
            self._streams.pop(file).close()

    def _stream(self, file: str) -> IO[bytes]:
        if file not in self._streams:
            self._streams[file] = (self.directory / file).open("wb")
            self._write_header(file)
        return self._streams[file]

    def _write_header(self, file: str) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name in self._files[file]:
            slot = self.slots[name]
            header[name] = {
                "dtype": _NAMES[slot.dtype],
                "shape": list(slot.shape),
                "data_offsets": [position, position + slot.bytes],
            }
            self._offset[name] = position
            position += slot.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        for name in self._files[file]:
            self._offset[name] += start
        stream = self._streams[file]
        stream.write(struct.pack("<Q", len(text)) + text)
        os.posix_fallocate(stream.fileno(), 0, start + position)  # a full disk shows here, not after hours

    def _write_index(self) -> None:
        index = {
            "metadata": {"total_parameters": self.total_parameters, "total_size": self.total_bytes},
            "weight_map": dict(sorted(self._file_of.items())),
        }
        (self.directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def parse_size(text: str) -> int:
    """Bytes of a size such as `5GB` (decimal units, as transformers reads them)."""
    try:
        return int(float(text[:-2]) * _UNITS[text[-2:]])
    except (KeyError, ValueError) as e:
        raise ConfigError(f"max_shard_size={text!r} is no size; write it as 5GB, 500MB or 100KB") from e


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
