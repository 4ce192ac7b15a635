"""The artifact store: immutable, content-addressed directories that are verified before every use.

    <root>/<stage>/<key>/                   payload, files 0444
    <root>/<stage>/<key>/.artifact.json     the record, written last (tasks/record.py)
    <root>/.staging    being written        .leases    who computes what (tasks/lease.py)
    <root>/.work       kept for a retry     .quarantine    damaged artifacts, with the reason
    <root>/.statcache  digests by stat

Invariant: what is under <stage>/<key> is whole. An artifact is written into a staging folder of the same file system,
synced, given its record, and renamed into place. The first rename wins and the loser adopts the winner, so even
two runs that know nothing of each other cannot mix their bytes. A crash leaves the staging folder behind, nothing else.
"""

import errno
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tasks.canonical import blake3_hex, canonical_json, flatten
from tasks.errors import StoreError
from tasks.record import RECORD_NAME, ArtifactRecord, UnreadableRecord, load
from tasks.remote import RemoteStore
from tasks.statcache import StatCache
from tasks.verify import Damage, find_damage


@dataclass(frozen=True)
class Artifact:
    """A verified artifact: its record, and where its payload lies."""

    record: ArtifactRecord
    path: Path

    @property
    def stage(self) -> str:
        return self.record.stage

    @property
    def key(self) -> str:
        return self.record.key

    @property
    def digest(self) -> str:
        return self.record.digest

    @property
    def parts(self) -> dict[str, str]:
        return self.record.parts

    @property
    def stats(self) -> dict[str, Any]:
        return self.record.stats


@dataclass(frozen=True)
class Lineage:
    """An artifact and what it was made of. `artifact` is None where it is no longer in the store."""

    role: str
    stage: str
    key: str
    artifact: Artifact | None
    inputs: list["Lineage"] = field(default_factory=list)
    replaced: bool = False
    """The store has another content under this key now, after a refresh; what was used is gone."""


class ArtifactStore:
    """A store on a local or shared file system. Cheap to construct; safe to use from many processes."""

    def __init__(self, root: Path | str, *, create: bool = True, remote: str | None = None) -> None:
        """Open the store, and create it when it is not there.

        Args:
            remote: URL of a store that machines share; see `tasks.remote`.

        Raises:
            StoreError: the path is not a directory, cannot be created, or (`create=False`) does not exist.
        """
        self.remote = RemoteStore(remote) if remote else None
        self.root = Path(root).expanduser().absolute()
        try:
            with self.guard("cannot be opened"):
                self.root.stat()
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:  # too long, or with a NUL
            raise StoreError(f"{root!s}: cannot be a store ({error}); name another folder (store.path)") from None
        if self.root.exists() and not self.root.is_dir():
            raise StoreError(f"{self.root}: not a directory, so not a store; name another folder (store.path)")
        if not self.root.exists():
            if not create:
                raise StoreError(f"{self.root}: there is no artifact store; run a recipe first, or name another folder")
            with self.guard("cannot be created"):
                try:
                    self.root.mkdir(parents=True, exist_ok=True)
                except FileNotFoundError as error:  # a file system of the kernel, such as /proc
                    raise StoreError(
                        f"{self.root}: cannot be created ({error.strerror}); name another folder"
                    ) from None
        self.statcache = StatCache(self.root / ".statcache")

    # -- layout -----------------------------------------------------------------------------------------------

    def location(self, stage: str, key: str) -> Path:
        """Where the artifact of this key is, or would be."""
        return self.root / stage / key

    @property
    def leases(self) -> Path:
        return self.root / ".leases"

    @property
    def staging(self) -> Path:
        return self.root / ".staging"

    @property
    def works(self) -> Path:
        return self.root / ".work"

    def work(self, stage: str, key: str) -> Path:
        """Folder that a stage keeps across attempts: training checkpoints, logs."""
        return self.works / f"{stage}-{key}"

    def tag(self, stage: str, key: str) -> str:
        """Marks the child processes of one key of this store; another store's are never touched."""
        store = blake3_hex(canonical_json(os.path.realpath(self.root)), 6)
        return f"{stage}-{key}@{store}"

    # -- reading ----------------------------------------------------------------------------------------------

    def inspect(self, stage: str, key: str, *, at: Path | None = None, full: bool = False) -> Artifact | Damage | None:
        """The artifact if it is there and its bytes are right, what is wrong with it, or None. Changes nothing.

        Args:
            at: Where an external payload lies now; else where it lay when it was recorded.
            full: Read every byte instead of trusting file stats.
        """
        home = self.location(stage, key)
        if not home.is_dir():
            return None
        try:
            record = load(home / RECORD_NAME, stage, key)
        except UnreadableRecord as error:
            return Damage(stage, key, RECORD_NAME, str(error))
        path = home if record.external is None else (at or Path(record.external))
        cache = self.statcache.folder(path)
        damage = find_damage(record, path, cache, full=full)
        cache.save()
        return damage or Artifact(record, path)

    def get(self, stage: str, key: str, *, at: Path | None = None) -> Artifact | None:
        """The artifact if it is there and its bytes are right, else None."""
        found = self.inspect(stage, key, at=at)
        return found if isinstance(found, Artifact) else None

    def records(self, stage: str | None = None) -> Iterator[ArtifactRecord]:
        """Records of the store, or of one stage, without looking at payloads; those it cannot read are left out."""
        for name, key in self.addresses(stage):
            try:
                yield load(self.location(name, key) / RECORD_NAME, name, key)
            except (UnreadableRecord, StoreError):
                continue

    def ls(self, stage: str | None = None) -> list[Artifact]:
        """All artifacts, oldest first, without looking at payloads."""
        records = sorted(self.records(stage), key=lambda record: record.producer.started)
        return [self._artifact(record) for record in records]

    def find(self, prefix: str) -> Artifact:
        """The one artifact whose key, or stage/key, starts with `prefix`.

        Raises:
            StoreError: there is none, or there are several.
        """
        stage, _, start = prefix.rpartition("/")
        hits = [record for record in self.records(stage or None) if record.key.startswith(start)]
        if not hits:
            raise StoreError(f"no artifact in {self.root} has a key starting with {prefix!r}; see `mcaflow ls`")
        if len(hits) > 1:
            names = ", ".join(f"{record.stage}/{record.key[:12]}" for record in hits[:5])
            raise StoreError(f"{prefix!r} fits {len(hits)} artifacts ({names}); give more digits")
        return self._artifact(hits[0])

    def lineage(self, artifact: Artifact, role: str = "") -> Lineage:
        """The artifact with all that it was made of, back to the sources."""
        parents = []
        for name, entry in artifact.record.inputs.items():
            try:
                record = load(self.location(entry.stage, entry.key) / RECORD_NAME, entry.stage, entry.key)
                known = {record.digest, *record.parts.values()}
                parents.append(replace(self.lineage(self._artifact(record), name), replaced=entry.digest not in known))
            except UnreadableRecord:
                parents.append(Lineage(name, entry.stage, entry.key, None))
        return Lineage(role, artifact.stage, artifact.key, artifact, parents)

    def verify(self, *, full: bool = False, stage: str | None = None) -> Iterator[tuple[str, str, Damage | None]]:
        """(stage, key, what is wrong or None) of each artifact. Reports only; a run mends what it needs."""
        for name, key in self.addresses(stage):
            found = self.inspect(name, key, full=full)
            yield name, key, found if isinstance(found, Damage) else None

    def nearest(self, stage: str, payload: dict[str, Any]) -> ArtifactRecord | None:
        """The record of this stage whose key payload differs in the fewest fields, the newest of several."""
        wanted = flatten(payload)

        def distance(record: ArtifactRecord) -> int:
            theirs = flatten(record.payload)
            return sum(wanted.get(name, _ABSENT) != theirs.get(name, _ABSENT) for name in wanted | theirs)

        newest_first = sorted(self.records(stage), key=lambda record: record.producer.started, reverse=True)
        return min(newest_first, key=distance, default=None)

    # -- writing ----------------------------------------------------------------------------------------------

    def quarantine(self, damage: Damage) -> Path | None:
        """Move a damaged artifact out of the way, with the reason beside it; None when it is gone already.

        Call it with the lease of the key, so that it is not a repaired artifact that is moved.
        """
        name = f"{damage.stage}-{damage.key}-{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:6]}"
        target = self.root / ".quarantine" / name
        with self.guard("cannot be written"):
            target.parent.mkdir(exist_ok=True)
            try:
                os.rename(self.location(damage.stage, damage.key), target)
            except FileNotFoundError:
                return None
            target.with_name(f"{name}.reason.txt").write_text(f"{damage}\n")
        return target

    def require_writable(self) -> None:
        """Raise StoreError when nothing can be written here, before anything expensive starts."""
        with self.guard("cannot be written"):
            self.staging.mkdir(exist_ok=True)
            probe = self.staging / f".probe-{uuid.uuid4().hex}"
            probe.write_bytes(b"x")
            probe.unlink()

    def require_space(self, needed: int, what: str) -> None:
        """Raise StoreError when fewer than `needed` bytes are free."""
        free = shutil.disk_usage(self.root).free
        if free < needed:
            raise StoreError(
                f"{self.root}: {what} needs {_size(needed)} and {_size(free)} are free; "
                "free some space or name a store on another disk (store.path)"
            )

    @contextmanager
    def guard(self, what: str, *, denials: bool = True) -> Iterator[None]:
        """Turn the file system's refusals into one line for the user; other errors pass.

        `denials=False` leaves permission errors alone, which a stage may meet outside of the store.
        """
        reasons = _FULL | (_DENIED if denials else {})
        try:
            yield
        except OSError as error:
            if error.errno not in reasons:
                raise
            reason = reasons[error.errno]
            raise StoreError(f"{self.root}: the artifact store {what}: {reason} ({error.strerror})") from error

    def addresses(self, stage: str | None = None) -> Iterator[tuple[str, str]]:
        """(stage, key) of every artifact, readable or not."""
        stages = [stage] if stage else sorted(p.name for p in self.root.iterdir() if p.is_dir() and p.name[0] != ".")
        for name in stages:
            folder = self.root / name
            keys = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
            yield from ((name, key) for key in keys)

    def _artifact(self, record: ArtifactRecord) -> Artifact:
        home = self.location(record.stage, record.key)
        return Artifact(record, home if record.external is None else Path(record.external))


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


_ABSENT = object()

_FULL = {
    errno.ENOSPC: "the disk is full; free some space or name a store on another disk (store.path)",
    errno.EDQUOT: "the disk quota is used up; free some space or name a store elsewhere (store.path)",
    errno.EROFS: "the file system is read-only; name a store that can be written (store.path)",
}
_DENIED = {
    errno.EACCES: "permission denied; name a store that this user can write (store.path)",
    errno.EPERM: "permission denied; name a store that this user can write (store.path)",
    errno.EEXIST: "a file is where a folder should be; remove it or name another folder (store.path)",
    errno.ENOTDIR: "a part of the path is not a directory; name another folder (store.path)",
}
