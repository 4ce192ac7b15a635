"""From a staging folder to an artifact: sync, digest, record, rename."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

from tasks.digests import Unsafe, payload_files
from tasks.errors import StageFailed
from tasks.record import RECORD_NAME, ArtifactRecord, FileEntry, dumps
from tasks.statcache import FolderCache
from tasks.store import Artifact, ArtifactStore
from tasks.verify import Damage


def seal(staging: Path, cache: FolderCache) -> dict[str, FileEntry]:
    """Make the files read-only, bring them to the disk, and digest them.

    Raises:
        StageFailed: a stage left a symbolic link or something that is no plain file.
    """
    try:
        names = payload_files(staging)
    except Unsafe as unsafe:
        raise StageFailed(f"the stage's output cannot be published: {unsafe}") from None
    # All of these first: by the time of its digest a file is old enough to be remembered by its stat.
    for rel in names:
        (staging / rel).chmod(0o444)
        _sync(staging / rel)
    for folder, _, _ in os.walk(staging):
        _sync(Path(folder))
    entries = {rel: cache.read(staging / rel, rel) for rel in names}
    return {rel: FileEntry(size=size, digest=digest) for rel, (size, digest) in entries.items()}


def publish(
    store: ArtifactStore, staging: Path, record: ArtifactRecord, check: Callable[[], None], *, replace: bool
) -> Artifact:
    """Write the record and move the sealed staging folder to its place.

    An artifact that is there already (of a run that this one does not know of, or before a refresh) is adopted if
    it is whole, and moved to quarantine otherwise; with `replace` also if its content digest is another.

    `check` raises when this run may no longer publish.
    """
    home = store.location(record.stage, record.key)
    with open(staging / RECORD_NAME, "x") as file:
        file.write(dumps(record))
        file.flush()
        os.fsync(file.fileno())
    (staging / RECORD_NAME).chmod(0o444)
    _sync(staging)
    home.parent.mkdir(exist_ok=True)
    _sync(store.root)
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
        if isinstance(found, Artifact) and (found.digest == record.digest or not replace):
            return found
        if found is not None:
            reason = Damage(record.stage, record.key, "", "was replaced by a refresh with other content")
            store.quarantine(reason if isinstance(found, Artifact) else found)


def publish_recorded(
    store: ArtifactStore, staging: Path, record: ArtifactRecord, check: Callable[[], None] = lambda: None
) -> Artifact:
    """Seal and publish what another store has made, whose bytes were compared with `record` already."""
    cache = store.statcache.folder(store.location(record.stage, record.key))
    seal(staging, cache)
    artifact = publish(store, staging, record, check, replace=False)
    cache.save()
    return artifact


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
