"""Are the bytes of an artifact still those of its record?"""

import os
from dataclasses import dataclass
from pathlib import Path

from tasks.digests import Unsafe, payload_files
from tasks.errors import StoreError
from tasks.record import ArtifactRecord
from tasks.statcache import FolderCache


@dataclass(frozen=True)
class Damage:
    """What is wrong with an artifact; `file` is "" when it is the artifact as a whole."""

    stage: str
    key: str
    file: str
    reason: str

    def __str__(self) -> str:
        where = f"{self.stage}/{self.key}" + (f"/{self.file}" if self.file else "")
        return f"{where} {self.reason}"


def find_damage(record: ArtifactRecord, path: Path, cache: FolderCache, *, full: bool) -> Damage | None:
    """The first difference between the payload at `path` and its record, None when there is none.

    Args:
        full: Read every file; else only those whose stat is not the remembered one.

    Raises:
        StoreError: a file may not be read by this user, which says nothing about its bytes.
    """

    def damage(file: str, reason: str) -> Damage:
        return Damage(record.stage, record.key, file, reason)

    if not path.is_dir():
        return damage("", f"is gone: there is no directory {path}")
    if record.external is None:
        try:
            present = set(payload_files(path))
        except Unsafe as unsafe:
            return damage("", f"holds something foreign: {unsafe}")
        except PermissionError:
            raise StoreError(f"{path}: not readable by this user; mend its permissions") from None
        if extra := sorted(present - record.files.keys()):
            return damage(extra[0], "is not in the record")
    for rel, entry in record.files.items():
        file = path / rel
        try:
            size = os.stat(file).st_size
            if size != entry.size:
                return damage(rel, f"has {size} bytes instead of {entry.size}")
            digest = _digest(cache, file, rel, entry.digest, full)
        except (FileNotFoundError, NotADirectoryError):
            return damage(rel, "is missing")
        except PermissionError:
            raise StoreError(f"{file}: not readable by this user; mend its permissions") from None
        except OSError as error:
            return damage(rel, f"cannot be read ({error.strerror})")
        if digest != entry.digest:
            return damage(rel, "has other bytes than were published")
    return None


def _digest(cache: FolderCache, file: Path, rel: str, expected: str, full: bool) -> str:
    if not full:
        _, digest, _ = cache.digest(file, rel)
        if digest == expected:
            return digest
    # A remembered digest alone never condemns a file.
    return cache.read(file, rel)[1]
