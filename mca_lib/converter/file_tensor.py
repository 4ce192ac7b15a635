"""A tensor that lies in a file: indexing it reads the bytes of the slice, and no others; or they are copied to another
file without coming here at all.

Reads are `pread`s into memory of ours. A memory map, which `safetensors` uses, would count as memory of the process for
as long as it is open, and a damaged disk would kill the process instead of raising an error.
"""

import errno
import itertools
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch

from mca_lib.errors import ModelError

SMALLEST_COPY = 1 << 16
"""Bytes; what is shorter is quicker brought through memory."""

_COPY_BYTES, _READ_BYTES = 1 << 30, 1 << 20
# Two file systems, or one that does not offer it.
_CANNOT_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)

type Bounds = tuple[tuple[int, int], ...]


@dataclass
class ReadCounter:
    """Bytes that were read, over all tensors of a source; threads share it."""

    bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, count: int) -> None:
        with self._lock:
            self.bytes += count


@dataclass(frozen=True)
class Run:
    """Consecutive bytes of an open file."""

    file: IO[bytes]
    path: Path
    start: int
    length: int
    counter: ReadCounter

    def copy_to(self, descriptor: int, offset: int) -> None:
        """Copy into another file, by the kernel where it can: half the work of reading and writing, and none where the
        file system shares blocks."""
        done = 0
        while done < self.length:
            count = self._copy_some(descriptor, offset, done)
            if not count:
                raise ModelError(f"{self.path}: ends at byte {self.start + done}, in the middle of a tensor")
            done += count
        self.counter.add(done)

    def _copy_some(self, descriptor: int, offset: int, done: int) -> int:
        count = min(self.length - done, _COPY_BYTES)
        try:
            return os.copy_file_range(self.file.fileno(), descriptor, count, self.start + done, offset + done)
        except OSError as error:
            if error.errno not in _CANNOT_COPY:
                raise
            data = os.pread(self.file.fileno(), min(count, _READ_BYTES), self.start + done)
            return os.pwrite(descriptor, data, offset + done)


type Content = torch.Tensor | Sequence[Run]
"""What is to be written for a tensor: itself, or the bytes that hold it, end to end."""


@dataclass(frozen=True)
class FileTensor:
    """`shape` elements of `dtype`, row-major, from byte `start` of an open file."""

    file: IO[bytes]
    path: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    counter: ReadCounter

    def __getitem__(self, index: object) -> torch.Tensor:
        """Slices of step 1, one for each leading axis."""
        value = torch.empty([stop - start for start, stop in bounds(index, self.shape)], dtype=self.dtype)
        self.read_into(value, index)
        return value

    def read_into(self, destination: torch.Tensor, index: object) -> None:
        """Read a slice into a CPU tensor of its shape and dtype, which may be a part of a larger one."""
        limits = bounds(index, self.shape)
        if destination.shape != tuple(stop - start for start, stop in limits) or destination.dtype != self.dtype:
            raise ValueError(f"{self.dtype} {limits} does not fit into {destination.dtype} {list(destination.shape)}")
        if not destination.numel():
            return
        cut = max((i for i, limit in enumerate(limits) if limit != (0, self.shape[i])), default=0)
        outer = limits[:cut]
        if not destination[(0,) * len(outer)].is_contiguous():
            destination.copy_(self[index])
            return
        bytes_of = destination.view(torch.uint8) if destination.ndim else destination[None].view(torch.uint8)
        target = bytes_of.numpy()
        steps = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        first = limits[cut][0] * steps[cut] if limits else 0
        for position in itertools.product(*(range(*limit) for limit in outer)):
            element = first + sum(p * s for p, s in zip(position, steps, strict=False))
            local = tuple(p - low for p, (low, _) in zip(position, outer, strict=True))
            self._read(memoryview(target[local]).cast("B"), self.start + element * self.dtype.itemsize)

    def runs(self, index: object) -> list[Run]:
        """Where the bytes of a slice lie, in the order of its elements."""
        limits = bounds(index, self.shape)
        if any(start == stop for start, stop in limits):
            return []
        cut = max((i for i, limit in enumerate(limits) if limit != (0, self.shape[i])), default=0)
        steps = [math.prod(self.shape[i + 1 :]) * self.dtype.itemsize for i in range(len(self.shape))]
        first = self.start + (limits[cut][0] * steps[cut] if limits else 0)
        length = (limits[cut][1] - limits[cut][0]) * steps[cut] if limits else self.dtype.itemsize
        starts = (
            first + sum(p * s for p, s in zip(position, steps, strict=False))
            for position in itertools.product(*(range(*limit) for limit in limits[:cut]))
        )
        return [Run(self.file, self.path, start, length, self.counter) for start in starts]

    def _read(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            count = os.preadv(self.file.fileno(), [buffer[done:]], offset + done)
            if not count:
                raise ModelError(f"{self.path}: ends at byte {offset + done}, in the middle of a tensor")
            done += count
        self.counter.add(done)


def bounds(index: object, shape: tuple[int, ...]) -> Bounds:
    """(start, stop) on every axis for an index of slices."""
    slices = index if isinstance(index, tuple) else (index,)
    if len(slices) > max(len(shape), 1) or not all(isinstance(s, slice) and s.step in (None, 1) for s in slices):
        raise TypeError(f"a tensor in a file is indexed by slices of step 1, not by {index!r}")
    limits = [s.indices(length)[:2] for s, length in zip(slices, shape, strict=False)]
    limits = [(start, max(start, stop)) for start, stop in limits]
    return (*limits, *((0, length) for length in shape[len(limits) :]))
