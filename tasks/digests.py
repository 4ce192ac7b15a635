"""Digests of files and of sets of files, and which files a payload consists of."""

import os
from collections.abc import Iterator
from pathlib import Path

from tasks.canonical import blake3_hex, canonical_json
from tasks.record import RECORD_NAME, FileEntry

# Big enough for blake3 to spread a buffer over the cores. Read, not mapped: a file that shrinks under a mapping
# kills the process with SIGBUS, and a damaged file is exactly what this code is there to find.
_CHUNK = 8 << 20


class Unsafe(Exception):
    """A payload holds something that is not a plain file below it; the message names it."""


def digest_file(path: Path) -> str:
    """BLAKE3 of a file's bytes, 64 hex digits."""
    from blake3 import blake3

    hasher = blake3(max_threads=blake3.AUTO)
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while n := file.readinto(buffer):
            hasher.update(view[:n])
    return hasher.hexdigest()


def digest_files(files: dict[str, FileEntry]) -> str:
    """One digest over names, sizes and contents of several files; no order, times or modes."""
    return blake3_hex(canonical_json({rel: [entry.size, entry.digest] for rel, entry in files.items()}, "files"))


def payload_files(root: Path) -> list[str]:
    """Paths below `root` of the plain files that make up a payload, sorted, without the record.

    Raises:
        Unsafe: a symbolic link, or something that is neither file nor directory. A link could point outside of the
            artifact, where nothing guards the bytes.
    """
    return sorted(_walk(root, ""))


def _walk(folder: Path, prefix: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            rel = prefix + entry.name
            if rel == RECORD_NAME:
                continue
            if entry.is_symlink():
                raise Unsafe(f"{rel} is a symbolic link")
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(folder / entry.name, rel + "/")
            elif entry.is_file(follow_symlinks=False):
                yield rel
            else:
                raise Unsafe(f"{rel} is not a plain file")
