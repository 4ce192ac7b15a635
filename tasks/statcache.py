"""Digests remembered by stat, so that a hit costs one `stat` per file instead of reading it.

As in git's index, an entry holds only while size, mtime, ctime, inode and device are what they were when the file was
hashed, and only if the file was already old then: a file that changed in the same tick of the clock as it was hashed
looks unchanged although it is not ("racily clean"), so such a digest is not remembered at all.

One small JSON file per folder and host, replaced as a whole, so concurrent writers lose at most a saving of time.
It carries a checksum; one that is damaged is ignored and rewritten. Nothing here is ever needed for correctness:
on a read-only store digests are computed each time.
"""

import json
import logging
import os
import socket
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from mca_lib.errors import DataError
from tasks.canonical import blake3_hex, canonical_json
from tasks.digests import digest_file

# How long two changes of a file may have the same time stamp: a tick of the kernel (at most 10 ms) where stamps have
# a sub-microsecond part, else the coarsest file system in use (FAT: 2 s).
_FINE_NS = 50 * 10**6
_COARSE_NS = 2 * 10**9

_log = logging.getLogger("mcaflow.statcache")


def _stamp(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]


def _is_settled(stamp: list[int], at: int) -> bool:
    """Whether a change at time `at` (ns) or later would show in the time stamps."""
    _, mtime, ctime, _, _ = stamp
    window = _FINE_NS if ctime % 1000 else _COARSE_NS
    return max(mtime, ctime) + window <= at


@dataclass
class FolderCache:
    """Remembered digests of the files of one folder. Use it in one thread, and `save` at the end."""

    file: Path
    entries: dict[str, list] = field(default_factory=dict)
    changed: bool = False

    def digest(self, path: Path, rel: str) -> tuple[int, str, bool]:
        """(size, BLAKE3, remembered) of a file; reads it unless its stat is the remembered one."""
        before = _stamp(os.stat(path))
        known = self.entries.get(rel)
        if known is not None and known[:-1] == before:
            return before[0], known[-1], True
        return (*self.read(path, rel), False)

    def read(self, path: Path, rel: str) -> tuple[int, str]:
        """(size, BLAKE3) of a file by reading it, whatever is remembered."""
        started = time.time_ns()
        before = _stamp(os.stat(path))
        digest = digest_file(path)
        after = _stamp(os.stat(path))
        if before == after and _is_settled(after, started):
            self.entries[rel] = [*after, digest]
            self.changed = True
        elif self.entries.pop(rel, None) is not None:
            self.changed = True
        return after[0], digest

    def save(self) -> None:
        """Write the cache if it changed; a failure costs time later, nothing else."""
        if not self.changed:
            return
        body = {"entries": self.entries}
        text = json.dumps({**body, "checksum": blake3_hex(canonical_json(body))})
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.file.parent, prefix=".tmp-")
        except OSError as error:
            _log.debug("stat cache not written: %s", error)
            return
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(name, self.file)
            self.changed = False
        except OSError as error:
            _log.debug("stat cache not written: %s", error)
            Path(name).unlink(missing_ok=True)


@dataclass(frozen=True)
class StatCache:
    """The stat caches of one store, per host: inode and device numbers mean something on one machine only."""

    root: Path

    def folder(self, path: Path) -> FolderCache:
        """The cache of a folder, empty when there is none or it is damaged."""
        name = blake3_hex(canonical_json([socket.gethostname(), os.path.realpath(path)]), 16)
        file = self.root / f"{name}.json"
        return FolderCache(file, _load(file))

    def digest(self, path: Path) -> str:
        """BLAKE3 of a data file of the user; one that is as it was when it was last read is not read again.

        Raises DataError when it cannot be read.
        """
        cache = self.folder(path.parent)
        try:
            _, digest, _ = cache.digest(path, path.name)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        cache.save()
        return digest


def _load(file: Path) -> dict[str, list]:
    try:
        body = json.loads(file.read_bytes())
        checksum = body.pop("checksum")
        if checksum != blake3_hex(canonical_json(body)):
            raise ValueError("checksum differs")
        return body["entries"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        _log.debug("stat cache %s ignored: %s", file.name, error)
        return {}
