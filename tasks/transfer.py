"""Artifacts as one file: from a store into a tar archive, and into another store with every byte checked.

    <stage>/<key>/.artifact.json, <stage>/<key>/<files>     what an artifact was made of comes before it

The archive is a plain tar, so that it can be read without this project.
"""

import os
import shutil
import tarfile
import uuid
from collections.abc import Callable
from pathlib import Path

from tasks.digests import digest_file
from tasks.errors import StoreError
from tasks.publish import publish_recorded
from tasks.record import RECORD_NAME, ArtifactRecord, UnreadableRecord, load
from tasks.store import Artifact, ArtifactStore, Lineage
from tasks.verify import Damage


def export_bundle(
    store: ArtifactStore, artifact: Artifact, target: Path, *, with_lineage: bool = True
) -> list[Artifact]:
    """Write the artifact, and with `with_lineage` all that it was made of, into a new tar file.

    A payload that lies outside of the store is packed too. `target` appears whole or not at all.

    Raises StoreError where one is damaged or no longer in the store, or where `target` exists.
    """
    if target.exists():
        raise StoreError(f"{target}: exists; name another file")
    chain = _in_order(store.lineage(artifact)) if with_lineage else [artifact]
    for member in chain:
        found = store.inspect(member.stage, member.key, at=member.path, full=True)
        if not isinstance(found, Artifact):
            raise StoreError(f"{member.stage}/{member.key[:12]}: {found or 'is no longer in the store'}; run again")
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        # A local model may be a folder of links, and two files of a store one file: what counts is the bytes.
        with tarfile.open(temporary, "x", dereference=True) as archive:
            for member in chain:
                _add(archive, store, member)
        os.rename(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return chain


def import_bundle(
    store: ArtifactStore, source: Path, report: Callable[[str], None] = lambda line: None
) -> list[Artifact]:
    """Publish every artifact of a tar file; those that the store has already are left as they are.

    Nothing of an artifact is visible before all of its bytes were checked against its record.

    Raises StoreError for a file that is no such archive, or holds anything else than its records say.
    """
    staging = store.staging / f".import-{uuid.uuid4().hex}"
    store.require_writable()
    try:
        with store.guard("cannot be written"):
            _unpack(source, staging)
            found = []
            for home in sorted(staging.glob("*/*"), key=lambda path: _started(path)):
                found.append(_publish(store, home, source, report))
        if not found:
            raise StoreError(f"{source}: holds no artifacts")
        return found
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _in_order(lineage: Lineage) -> list[Artifact]:
    """Inputs first, each once."""
    found: dict[tuple[str, str], Artifact] = {}
    for parent in lineage.inputs:
        if parent.artifact is None or parent.replaced:
            raise StoreError(
                f"{parent.stage}/{parent.key[:12]}, of which {lineage.stage}/{lineage.key[:12]} was made, is no longer "
                "in the store; export without lineage"
            )
        found |= {(a.stage, a.key): a for a in _in_order(parent)}
    assert lineage.artifact is not None
    found[lineage.stage, lineage.key] = lineage.artifact
    return list(found.values())


def _add(archive: tarfile.TarFile, store: ArtifactStore, artifact: Artifact) -> None:
    folder = f"{artifact.stage}/{artifact.key}"
    archive.add(store.location(artifact.stage, artifact.key) / RECORD_NAME, f"{folder}/{RECORD_NAME}")
    for name in sorted(artifact.record.files):
        archive.add(artifact.path / name, f"{folder}/{name}")


def _unpack(source: Path, staging: Path) -> None:
    try:
        with tarfile.open(source) as archive:
            for member in archive:
                if not (member.isfile() or member.isdir()) or member.name.count("/") < 2 - member.isdir():
                    raise StoreError(f"{source}: {member.name!r:.200} has no place in an archive of artifacts")
                archive.extract(member, staging, filter="data")
    except FileNotFoundError:
        raise StoreError(f"{source}: no such file") from None
    except (tarfile.TarError, EOFError) as error:
        raise StoreError(f"{source}: no whole archive of artifacts ({error})") from None


def _started(home: Path) -> str:
    try:
        return load(home / RECORD_NAME, home.parent.name, home.name).producer.started
    except UnreadableRecord:
        return ""


def _publish(store: ArtifactStore, home: Path, source: Path, report: Callable[[str], None]) -> Artifact:
    stage, key = home.parent.name, home.name
    try:
        record = load(home / RECORD_NAME, stage, key)
    except UnreadableRecord as error:
        raise StoreError(f"{source}: {stage}/{key} {error}") from None
    if isinstance(known := store.inspect(stage, key), Artifact):
        report(f"{stage}/{key[:12]}  is in the store already")
        return known
    if isinstance(known, Damage):
        store.quarantine(known)
    _check(home, record, source)
    (home / RECORD_NAME).unlink()
    # Whatever lay outside of the other store lies in this one now.
    record = record.model_copy(update={"external": None})
    artifact = publish_recorded(store, home, record)
    report(f"{stage}/{key[:12]}  imported")
    return artifact


def _check(home: Path, record: ArtifactRecord, source: Path) -> None:
    present = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()} - {RECORD_NAME}
    for name in sorted(present ^ record.files.keys()):
        raise StoreError(f"{source}: {record.stage}/{record.key}/{name} is not what its record says")
    for name, entry in record.files.items():
        if digest_file(home / name) != entry.digest:
            raise StoreError(f"{source}: {record.stage}/{record.key}/{name} has other bytes than its record says")
