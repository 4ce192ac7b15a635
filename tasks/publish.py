"""From a staging folder to an artifact: sync, digest, record, rename."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

from tasks.digests import Unsafe, digest_files, payload_files
from tasks.errors import StageFailed
from tasks.record import RECORD_NAME, ArtifactRecord, FileEntry, dumps
from tasks.statcache import FolderCache
from tasks.store import Artifact, ArtifactStore


def seal(staging: Path, cache: FolderCache) -> dict[str, FileEntry]:
    """Make the files read-only, bring them to the disk, and digest them.

    Raises:
        StageFailed: a stage left a symbolic link or something that is no plain file.
    """
    try:
        names = payload_files(staging)
    except Unsafe as unsafe:
        raise StageFailed(f"the stage's output cannot be published: {unsafe}") from None
    files = {}
    for rel in names:
        path = staging / rel
        path.chmod(0o444)
        _sync(path)
        size, digest = cache.read(path, rel)
        files[rel] = FileEntry(size=size, digest=digest)
    for folder, _, _ in os.walk(staging):
        _sync(Path(folder))
    return files


def digest_external(root: Path, names: tuple[str, ...] | None, cache: FolderCache) -> dict[str, FileEntry]:
    """Digests of a payload that stays where it is; `names` None takes every file."""
    files = {}
    for rel in sorted(names) if names is not None else payload_files(root):
        size, digest, _ = cache.digest(root / rel, rel)
        files[rel] = FileEntry(size=size, digest=digest)
    return files


def publish(store: ArtifactStore, staging: Path, record: ArtifactRecord, check: Callable[[], None]) -> Artifact:
    """Write the record and move the sealed staging folder to its place; adopt the artifact that was there first.

    `check` raises LeaseLost when this run may no longer publish.
    """
    home = store.location(record.stage, record.key)
    with open(staging / RECORD_NAME, "x") as file:
        file.write(dumps(record))
        file.flush()
        os.fsync(file.fileno())
    (staging / RECORD_NAME).chmod(0o444)
    _sync(staging)
    home.parent.mkdir(exist_ok=True)
    while True:
        check()
        try:
            os.rename(staging, home)
            _sync(home.parent)
            return Artifact(record, home if record.external is None else Path(record.external))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        found = store.inspect(record.stage, record.key)
        if isinstance(found, Artifact):
            return found
        if found is not None:
            store.quarantine(found)


def record_files_digest(files: dict[str, FileEntry], semantic: str | None) -> str:
    """The semantic digest of the stage, or the one over the files."""
    return semantic if semantic is not None else digest_files(files)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
