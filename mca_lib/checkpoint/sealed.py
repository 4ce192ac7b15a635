"""Directories that are whole or absent: staged, digested, recorded, renamed.

    .staging-*      being written; never read, removed by the next run
    NAME/           whole: its record, written last, names every file with size and BLAKE3
    .replaced-*     a former NAME, on its way to be removed

A crash at any instant leaves either the old state or the new one. A directory whose bytes differ from its record is
damaged, and nobody may read it.
"""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3

from mca_lib.job import disk_cause

RECORD_NAME = ".record.json"
STAGING_PREFIX = ".staging-"
REPLACED_PREFIX = ".replaced-"
_BLOCK = 2**23
"""Bytes that are read at once; enough for a digest by several threads."""


def new_staging(parent: Path) -> Path:
    """A fresh directory next to where the sealed one will be."""
    staging = parent / f"{STAGING_PREFIX}{uuid.uuid4().hex[:12]}"
    staging.mkdir(parents=True)
    return staging


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """An OSError of the block, or a full disk that a library made an error of its own of, names a file."""
    try:
        yield
    except Exception as error:
        cause = error if isinstance(error, OSError) else disk_cause(error)
        if cause is None or cause.errno is None or (cause is error and cause.filename):
            raise
        raise OSError(cause.errno, cause.strerror, cause.filename or str(path)) from error


def remove_leftovers(parent: Path) -> None:
    """Remove what interrupted writers left behind. Only when no writer is at work."""
    for pattern in (f"{STAGING_PREFIX}*", f"{REPLACED_PREFIX}*"):
        for path in parent.glob(pattern):
            _remove(path)


def seal(staging: Path, target: Path, meta: dict[str, Any]) -> None:
    """Record everything in `staging`, then give it its name. An existing `target` is replaced."""
    files = {}
    for path in sorted(p for p in staging.rglob("*") if p.is_file()):
        files[path.relative_to(staging).as_posix()] = {"size": path.stat().st_size, "blake3": file_digest(path)}
    record = staging / RECORD_NAME
    with naming(record):
        record.write_text(json.dumps({**meta, "files": files}, indent=1))
    move_into_place(staging, target)


def move_into_place(staging: Path, target: Path) -> None:
    """Rename `staging` to `target`, replacing what is there, when all its bytes are on the disk."""
    sync(staging)
    replaced = _set_aside(target) if target.exists() else None
    staging.rename(target)
    sync(target.parent, deep=False)
    if replaced:
        shutil.rmtree(replaced)


def remove(directory: Path) -> None:
    """Remove a sealed directory; it loses its name first, so that no half of it is ever met under it."""
    _remove(_set_aside(directory))


def _remove(path: Path) -> None:
    """A directory with all that is in it, or what somebody put in the place of one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def set_damaged_aside(directory: Path) -> Path:
    """Rename a damaged directory to what nobody reads, for whoever wants to look at it. Returns where it is."""
    return directory.rename(directory.with_name(f"damaged-{directory.name}-{uuid.uuid4().hex[:6]}"))


def _set_aside(directory: Path) -> Path:
    aside = directory.parent / f"{REPLACED_PREFIX}{uuid.uuid4().hex[:12]}"
    return directory.rename(aside)


def read_record(directory: Path) -> dict[str, Any] | None:
    """The record of a sealed directory; None when there is none that can be read and names files."""
    try:
        record = json.loads((directory / RECORD_NAME).read_text())
    except (OSError, ValueError):
        return None
    files = record.get("files") if isinstance(record, dict) else None
    # All that is sealed holds a file.
    if not files or not isinstance(files, dict):
        return None
    entries = files.values()
    return record if all(isinstance(e, dict) and {"size", "blake3"} <= e.keys() for e in entries) else None


def find_damage(directory: Path) -> str | None:
    """What is wrong with a sealed directory, in one line; None when every byte is as recorded."""
    record = read_record(directory)
    if record is None:
        return f"{RECORD_NAME} is missing or unreadable"
    for name, expected in record["files"].items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["size"]:
            return f"{name} has {path.stat().st_size} bytes instead of {expected['size']}"
        if file_digest(path) != expected["blake3"]:
            return f"{name} has other bytes than recorded"
    return None


def file_digest(path: Path) -> str:
    """BLAKE3 of a file. It is read and not mapped: pages of a mapped file count as memory of the process."""
    hasher, buffer = blake3(max_threads=blake3.AUTO), memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    return hasher.hexdigest()


def sync(directory: Path, *, deep: bool = True) -> None:
    """Send a directory's names, or a file, to the disk, and with `deep` everything in it."""
    for path in [*directory.rglob("*"), directory] if deep else [directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
