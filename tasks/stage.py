"""The stage contract: what a stage says about itself, and `ensure`, which makes its artifact exist once.

    key = BLAKE3(stage name, stage version, identity, digest of each input)

`ensure` serves the artifact of that key if its bytes are right; else it takes the lease, looks again, lets the stage
produce, and publishes. `probe` tells what `ensure` would do, and which field makes the difference, and changes nothing.
"""

import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tasks.canonical import JSON, canonical, flatten, stage_key
from tasks.errors import StageFailed, StoreError
from tasks.jobs import run_job
from tasks.lease import Lease, acquire
from tasks.process import GRACE_SECONDS, kill_tagged, run_command
from tasks.publish import digest_external, publish, record_files_digest, seal
from tasks.record import ArtifactRecord, InputEntry, finite, producer
from tasks.report import LogReporter, Reporter
from tasks.store import Artifact, ArtifactStore
from tasks.verify import Damage


@dataclass(frozen=True)
class Input:
    """An input artifact, or the part of one that the stage depends on. `path` is where an external payload lies."""

    digest: str
    stage: str
    key: str
    path: Path | None = None

    @staticmethod
    def of(artifact: Artifact, part: str | None = None) -> "Input":
        """The whole artifact, or one of its `parts`: a change elsewhere in it then changes no key."""
        digest = artifact.digest if part is None else artifact.parts[part]
        return Input(digest, artifact.stage, artifact.key, artifact.path)


@dataclass(frozen=True)
class Produced:
    """What a stage made, beside the files in its staging folder."""

    digest: str | None = None
    """Semantic digest; None takes the digest over the files."""
    parts: dict[str, str] = field(default_factory=dict)
    """Digests of parts that later stages depend on separately: "tokenizer", "config", "eval"."""
    stats: dict[str, Any] = field(default_factory=dict)
    external: Path | None = None
    """The payload lies there (a local model directory), not in the store."""
    external_files: tuple[str, ...] | None = None
    """Files below `external` that are the payload; None for all."""


@dataclass(frozen=True)
class Outcome:
    """What `ensure` did. `reason` says why it was computed; "" for a hit."""

    artifact: Artifact
    cached: bool
    seconds: float
    reason: str


@dataclass(frozen=True)
class FieldChange:
    """A field of the key payload, `identity.learning_rate`, and its two values; None where it is absent."""

    field: str
    old: JSON
    new: JSON


@dataclass(frozen=True)
class Hit:
    """`ensure` would serve this artifact."""

    artifact: Artifact


@dataclass(frozen=True)
class Miss:
    """`ensure` would compute; `changed` is against the nearest record of the stage, if there is one."""

    reason: str
    changed: list[FieldChange]


class Stage(ABC):
    """One stage with its parameters and input artifacts. Subclasses are usually frozen dataclasses."""

    name: ClassVar[str]
    """Folder in the store."""
    version: ClassVar[int]
    """Raised by hand when the meaning of the output changes."""

    @abstractmethod
    def identity(self) -> dict[str, JSON]:
        """What changes the bytes of the output, and nothing else."""

    def inputs(self) -> dict[str, Input]:
        """Input artifacts by role."""
        return {}

    @abstractmethod
    def produce(self, ctx: "StageContext") -> Produced:
        """Write the payload into `ctx.staging`."""

    def external(self) -> Path | None:
        """Where the payload lies if it stays outside of the store; a hit is verified there."""
        return None

    def space_needed(self) -> int:
        """Bytes that the store must have free before this stage starts; an estimate."""
        return 0


@dataclass(frozen=True)
class StageContext:
    """What a stage works with while it produces."""

    staging: Path
    """Private folder on the store's file system; what is in it gets published."""
    work: Path
    """Folder kept per key across attempts (checkpoints, logs); removed after publishing."""
    report: Reporter
    store: ArtifactStore
    tag: str
    check: Callable[[], None]
    """Raises LeaseLost when another run has taken over."""

    @property
    def logs(self) -> Path:
        """Folder of the children's specs, results and logs."""
        return self.work / "logs"

    def run_job(self, name: str, spec: dict[str, Any], **options: Any) -> dict[str, Any]:
        """One job of `mca_lib.job` in a child process; options as of `run_command`. See `tasks.jobs`."""
        return run_job(name, spec, folder=self.logs, **self._defaults(options))

    def run_command(self, argv: Sequence[str], *, log_name: str = "command", **options: Any) -> None:
        """A supervised child process, log in `logs/<log_name>.log`; options as of `tasks.process.run_command`."""
        run_command(argv, log_path=self.logs / f"{log_name}.log", **self._defaults(options))

    def _defaults(self, options: Mapping[str, Any]) -> dict[str, Any]:
        own = {"tag": self.tag, "check": self.check, "on_progress": self._forward, "grace": GRACE_SECONDS}
        return own | dict(options)

    def _forward(self, report: dict[str, Any]) -> None:
        metrics = {name: value for name, value in report.items() if name not in ("done", "total")}
        if "done" in report:
            self.report.progress(report["done"], report.get("total"), **metrics)
        for name, say in (("info", self.report.info), ("warning", self.report.warning)):
            if "done" not in report and isinstance(report.get(name), str):
                say(report[name])


def key_payload(stage: Stage) -> dict[str, JSON]:
    """What the key is made of. Raises CanonicalError for a value that has no canonical form."""
    payload = {
        "stage": stage.name,
        "version": stage.version,
        "identity": stage.identity(),
        "inputs": {role: entry.digest for role, entry in stage.inputs().items()},
    }
    return canonical(payload, stage.name)


def probe(store: ArtifactStore, stage: Stage) -> Hit | Miss:
    """What `ensure` would do. Changes nothing."""
    payload = key_payload(stage)
    found = store.inspect(stage.name, stage_key(payload), at=stage.external())
    if isinstance(found, Artifact):
        return Hit(found)
    return _explain(store, stage, payload, found)


def ensure(store: ArtifactStore, stage: Stage, *, refresh: bool = False, reporter: Reporter | None = None) -> Outcome:
    """Serve the stage's artifact, or compute and publish it.

    Args:
        refresh: Compute even if the artifact is there.

    Raises:
        UserError: a mistake of the user, found by the stage or the store.
        StageFailed, LeaseLost, Cancelled: see `tasks.errors`; the work folder and its logs are kept.
    """
    started = time.monotonic()
    report = reporter or LogReporter(stage.name)
    payload = key_payload(stage)
    key = stage_key(payload)
    reason = "refresh was asked for"
    if not refresh:
        found = store.inspect(stage.name, key, at=stage.external())
        if isinstance(found, Artifact):
            return Outcome(found, True, time.monotonic() - started, "")
        reason = _explain(store, stage, payload, found).reason
    with store.guard("cannot be written"), acquire(store.leases, f"{stage.name}-{key}", on_wait=report.info) as lease:
        found = store.inspect(stage.name, key, at=stage.external())
        if isinstance(found, Artifact) and not refresh:
            return Outcome(found, True, time.monotonic() - started, "")
        if isinstance(found, Damage):
            store.quarantine(found)
            report.warning(f"{found}; moved to quarantine, computing it again")
        artifact = _compute(store, stage, payload, key, lease, report, replace=found if refresh else None)
    return Outcome(artifact, False, time.monotonic() - started, reason)


def _compute(
    store: ArtifactStore,
    stage: Stage,
    payload: dict[str, JSON],
    key: str,
    lease: Lease,
    report: Reporter,
    replace: Artifact | Damage | None,
) -> Artifact:
    """Produce and publish, under the lease."""
    _verify_inputs(store, stage)
    store.require_space(stage.space_needed(), stage.name)
    tag = store.tag(stage.name, key)
    kill_tagged(tag)
    name = f"{stage.name}-{key}"
    store.staging.mkdir(exist_ok=True)
    for leftover in store.staging.glob(f"{name}.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    staging = store.staging / f"{name}.{lease.number}.{uuid.uuid4().hex[:8]}"
    work = store.work(stage.name, key)
    staging.mkdir()
    work.mkdir(parents=True, exist_ok=True)
    context = StageContext(staging, work, report, store, tag, lease.check)
    began, clock = time.time(), time.monotonic()
    try:
        produced = stage.produce(context)
        lease.check()
        cache = store.statcache.folder(produced.external or store.location(stage.name, key))
        if produced.external is None:
            files = seal(staging, cache)
        else:
            files = digest_external(produced.external, produced.external_files, cache)
        record = ArtifactRecord(
            stage=stage.name,
            version=stage.version,
            key=key,
            payload=payload,
            digest=record_files_digest(files, produced.digest),
            parts=produced.parts,
            files=files,
            external=str(produced.external) if produced.external else None,
            inputs={role: InputEntry(digest=i.digest, stage=i.stage, key=i.key) for role, i in stage.inputs().items()},
            producer=producer(began, time.monotonic() - clock),
            stats=finite(produced.stats),
        )
        if isinstance(replace, Artifact) and replace.digest != record.digest:
            store.quarantine(Damage(stage.name, key, "", "was replaced by a refresh with other content"))
        artifact = publish(store, staging, record, lease.check)
        cache.save()
    except StageFailed:
        report.warning(f"{stage.name} failed; its work folder and logs are kept in {work}")
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    shutil.rmtree(work, ignore_errors=True)
    return artifact


def _verify_inputs(store: ArtifactStore, stage: Stage) -> None:
    """Raise StoreError unless every input artifact is there with the bytes that its digest stands for."""
    for role, entry in stage.inputs().items():
        found = store.inspect(entry.stage, entry.key, at=entry.path)
        if found is None:
            raise StoreError(f"{stage.name}: input {role} ({entry.stage}/{entry.key}) is not in the store; run again")
        if isinstance(found, Damage):
            raise StoreError(f"{stage.name}: input {role} is damaged: {found}; run again to compute it anew")


def _explain(store: ArtifactStore, stage: Stage, payload: dict[str, JSON], found: Damage | None) -> Miss:
    """Why there is no artifact of this payload."""
    if found is not None:
        return Miss(f"damaged: {found}", [])
    nearest = store.nearest(stage.name, payload)
    if nearest is None:
        return Miss("never computed", [])
    old, new = flatten(nearest.payload), flatten(payload)
    names = [name for name in old | new if (name in old, old.get(name)) != (name in new, new.get(name))]
    changed = [FieldChange(name, old.get(name), new.get(name)) for name in names]
    return Miss(f"{', '.join(names)} changed", changed)
