"""The inside of `ensure`: with the lease in hand, let a stage produce, and publish what it made."""

import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from tasks.canonical import JSON, canonical_json
from tasks.contract import Produced, Stage, StageContext
from tasks.digests import digest_files
from tasks.errors import StageFailed, StoreError
from tasks.lease import Lease, any_held, is_held
from tasks.process import kill_tagged, secret_in
from tasks.publish import publish, publish_recorded, seal
from tasks.record import ArtifactRecord, FileEntry, InputEntry, finite, producer
from tasks.report import Reporter
from tasks.store import Artifact, ArtifactStore
from tasks.verify import Damage

# With less than this free, a disk is as good as full.
_FULL = 1 << 20


def compute(
    store: ArtifactStore,
    stage: Stage,
    payload: dict[str, JSON],
    key: str,
    lease: Lease,
    check: Callable[[], None],
    report: Reporter,
    *,
    replace: bool,
) -> Artifact:
    """Produce and publish the artifact of `key`.

    `check` raises when this run may go on no longer: cancelled, or the lease lost. The work folder stays unless the
    artifact was published. `replace` is for a refresh, see `publish`.
    """
    _verify_inputs(store, stage)
    store.require_space(stage.space_needed(), f"stage {stage.name}")
    tag = store.tag(stage.name, key)
    kill_tagged(tag)
    with store.guard("cannot be written"):
        staging, work = _folders(store, stage, key, lease)
    context = StageContext(staging, work, report, store, tag, check)
    began, clock = time.time(), time.monotonic()
    report.progress(0, None)  # it has begun; some stages say nothing for a while
    try:
        with store.guard("cannot be written", denials=False):
            produced = stage.produce(context)
        check()
        with store.guard("cannot be written"):
            cache = store.statcache.folder(store.location(stage.name, key))
            sealed = seal(staging, cache)
            files = sealed if produced.external is None else produced.external_files
            record = _record(stage, key, payload, produced, files, began, time.monotonic() - clock)
            artifact = publish(store, staging, record, check, replace=replace)
            cache.save()
    except StageFailed:
        report.warning(f"{stage.name} failed; logs and work folder are kept in {work}")
        # A child that finds no room dies in any of many ways, often without a word: its log is on the same disk.
        store.require_space(_FULL, f"stage {stage.name} failed for want of room: it")
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    shutil.rmtree(work, ignore_errors=True)
    return artifact


def fetch(
    store: ArtifactStore, name: str, key: str, lease: Lease, check: Callable[[], None], report: Reporter
) -> Artifact | None:
    """Publish the artifact that the remote store has, with the lease in hand; None where there is none."""
    if store.remote is None:
        return None
    with store.guard("cannot be written"):
        staging = _new_staging(store, lease)
        try:
            record = store.remote.fetch(name, key, staging, report)
            if record is None:
                return None
            check()
            return publish_recorded(store, staging, record, check)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _verify_inputs(store: ArtifactStore, stage: Stage) -> None:
    """Raise StoreError unless every input artifact is there with the bytes that its digest stands for."""
    for role, entry in stage.inputs().items():
        found = store.inspect(entry.stage, entry.key, at=entry.path)
        if found is None:
            raise StoreError(f"{stage.name}: input {role} ({entry.stage}/{entry.key}) is not in the store; run again")
        if isinstance(found, Damage):
            raise StoreError(f"{stage.name}: input {role} is damaged: {found}; run again to compute it anew")


def _folders(store: ArtifactStore, stage: Stage, key: str, lease: Lease) -> tuple[Path, Path]:
    """An empty staging folder and the work folder of this key; what dead runs left behind goes."""
    store.staging.mkdir(exist_ok=True)
    for leftover in store.staging.iterdir():
        holder = leftover.name.rpartition(".")[0]  # <stage>-<key>.<lease number>.<random>
        # One whose lease was taken over goes even if its run is alive: it can no longer publish then.
        if not leftover.name.startswith(".") and not is_held(store.leases / holder):
            shutil.rmtree(leftover, ignore_errors=True)
    _sweep_work(store)
    staging = _new_staging(store, lease)
    work = store.work(stage.name, key)
    work.mkdir(parents=True, exist_ok=True)
    return staging, work


def _new_staging(store: ArtifactStore, lease: Lease) -> Path:
    store.staging.mkdir(exist_ok=True)
    staging = store.staging / f"{lease.path.name}.{uuid.uuid4().hex[:8]}"
    staging.mkdir()
    return staging


def _sweep_work(store: ArtifactStore) -> None:
    """Remove work folders of published artifacts: a run that is killed right after publishing leaves its own."""
    if not store.works.is_dir():
        return
    for work in store.works.iterdir():
        stage, _, key = work.name.rpartition("-")
        if store.location(stage, key).exists() and not any_held(store.leases, work.name):
            shutil.rmtree(work, ignore_errors=True)


def _record(
    stage: Stage,
    key: str,
    payload: dict[str, JSON],
    produced: Produced,
    files: dict[str, FileEntry],
    began: float,
    seconds: float,
) -> ArtifactRecord:
    stats = finite(produced.stats)
    if secret := secret_in(canonical_json([payload, stats])):
        raise StageFailed(f"{stage.name}: the value of {secret} would be in the record; pass it by environment only")
    parts = {part: digest_files({rel: files[rel] for rel in names}) for part, names in produced.file_parts.items()}
    return ArtifactRecord(
        stage=stage.name,
        version=stage.version,
        key=key,
        payload=payload,
        digest=produced.digest if produced.digest is not None else digest_files(files),
        parts=produced.parts | parts,
        files=files,
        external=str(produced.external) if produced.external else None,
        inputs={role: InputEntry(digest=i.digest, stage=i.stage, key=i.key) for role, i in stage.inputs().items()},
        producer=producer(began, seconds),
        stats=stats,
    )
