"""Running a stage: `ensure` makes its artifact exist, once; `probe` tells what `ensure` would do.

    key = BLAKE3(stage name, stage version, identity, digest of each input)

`ensure` serves the artifact of that key if its bytes are right. Else it takes the lease, looks again (the run that held
it may have finished), moves a damaged artifact to quarantine, lets the stage produce, and publishes.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from tasks.cancel import scope
from tasks.canonical import JSON, flatten, stage_key
from tasks.compute import compute, fetch
from tasks.contract import Input, Produced, Stage, StageContext, key_payload
from tasks.lease import acquire
from tasks.ledger import Run
from tasks.report import LogReporter, Reporter
from tasks.store import Artifact, ArtifactStore
from tasks.verify import Damage

__all__ = [
    "Artifact",
    "FieldChange",
    "Hit",
    "Input",
    "Miss",
    "Occupy",
    "Outcome",
    "Produced",
    "Reporter",
    "Stage",
    "StageContext",
    "at_once",
    "ensure",
    "probe",
    "serve",
]


type Occupy = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Holds what a stage needs to compute, such as GPUs. While it waits for that, it calls its argument now and then, which
raises when the run may go on no longer."""


def at_once(check: Callable[[], None]) -> AbstractContextManager[None]:
    """The stage needs nothing that others could hold."""
    return nullcontext()


@dataclass(frozen=True)
class Outcome:
    """What `ensure` did. `reason` says why the artifact was computed; "" for a hit."""

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
    remote: bool = False
    """No: `ensure` would fetch it from the remote store."""


def probe(store: ArtifactStore, stage: Stage) -> Hit | Miss:
    """What `ensure` would do. Changes nothing."""
    stage = stage.resolve(store, LogReporter(stage.name))
    payload = key_payload(stage)
    key, at = stage_key(payload), stage.external()
    found = store.inspect(stage.name, key, at=at)
    if isinstance(found, Artifact):
        return Hit(found)
    if at is None and store.remote is not None and store.remote.has(stage.name, key):
        return Miss("in the remote store", [], remote=True)
    return _explain(store, stage, payload, found)


def ensure(
    store: ArtifactStore,
    stage: Stage,
    *,
    refresh: bool = False,
    reporter: Reporter | None = None,
    run: Run | None = None,
    occupy: Occupy = at_once,
) -> Outcome:
    """Serve the stage's artifact, or compute and publish it.

    Args:
        refresh: Compute even if the artifact is there; the old one is kept in quarantine when its content differs.
            What an earlier attempt of the same run has computed is served all the same.
        run: The entry of the ledger that says who uses it; without one, a collection of garbage may take it any time.
        occupy: Entered around the computing alone, with the lease in hand: not for what the store has.

    Raises:
        UserError: a mistake of the user, found by the stage or the store.
        StageFailed, LeaseLost, Cancelled: see `tasks.errors`; the work folder and its logs are kept.
    """
    started = time.monotonic()
    report = reporter or LogReporter(stage.name)
    stage = stage.resolve(store, report)
    payload = key_payload(stage)
    refresh = refresh and not (run and run.computed_before(stage.name, stage_key(payload)))
    outcome = _ensure(store, stage, payload, refresh, report, run, occupy, started)
    if run is not None:
        run.used(stage.name, outcome.artifact.key, cached=outcome.cached, seconds=outcome.seconds)
    return outcome


def serve(
    store: ArtifactStore, stage: Stage, *, reporter: Reporter | None = None, run: Run | None = None
) -> Outcome | None:
    """What `ensure` would serve from this store; None where it would have to fetch or to compute.

    Args and errors as of `ensure`; nothing is written but the entry of `run`.
    """
    started = time.monotonic()
    stage = stage.resolve(store, reporter or LogReporter(stage.name))
    key = stage_key(key_payload(stage))
    with run.looking_up(stage.name, key) if run else nullcontext():
        found = store.inspect(stage.name, key, at=stage.external())
    if not isinstance(found, Artifact):
        return None
    outcome = Outcome(found, True, time.monotonic() - started, "")
    if run is not None:
        run.used(stage.name, key, cached=True, seconds=outcome.seconds)
    return outcome


def _ensure(
    store: ArtifactStore,
    stage: Stage,
    payload: dict[str, JSON],
    refresh: bool,
    report: Reporter,
    run: Run | None,
    occupy: Occupy,
    started: float,
) -> Outcome:
    key = stage_key(payload)
    at = stage.external()
    reason = "refresh was asked for"
    with run.looking_up(stage.name, key) if run else nullcontext():
        found = None if refresh else store.inspect(stage.name, key, at=at)
    if not refresh:
        if isinstance(found, Artifact):
            return Outcome(found, True, time.monotonic() - started, "")
        reason = _explain(store, stage, payload, found).reason
    with scope() as running:
        with store.guard("cannot be written"):
            lease = acquire(store.leases, f"{stage.name}-{key}", scope=running, on_wait=report.info)
        with lease:
            found = store.inspect(stage.name, key, at=at)
            if isinstance(found, Artifact) and not refresh:
                return Outcome(found, True, time.monotonic() - started, "")
            if isinstance(found, Damage):
                store.quarantine(found)
                report.warning(f"{found}; moved to quarantine, computing it again")

            def check() -> None:
                running.check()
                lease.check()

            if not refresh and at is None and (fetched := fetch(store, stage.name, key, lease, check, report)):
                return Outcome(fetched, True, time.monotonic() - started, "")
            with occupy(check):
                artifact = compute(store, stage, payload, key, lease, check, report, replace=refresh)
            if store.remote is not None and at is None:
                store.remote.push(artifact, report)
    return Outcome(artifact, False, time.monotonic() - started, reason)


def _explain(store: ArtifactStore, stage: Stage, payload: dict[str, JSON], found: Damage | None) -> Miss:
    """Why there is no artifact of this payload."""
    if found is not None:
        return Miss(f"damaged: {found}", [])
    nearest = store.nearest(stage.name, payload)
    if nearest is None:
        return Miss("never computed", [])
    old, new = flatten(nearest.payload), flatten(payload)
    names = [name for name in old | new if (name in old, old.get(name)) != (name in new, new.get(name))]
    # An empty mapping is a leaf, `columns`, beside which `columns.prompt` says what changed.
    names = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    changed = [FieldChange(name, old.get(name), new.get(name)) for name in names]
    return Miss(f"{', '.join(names)} changed", changed)
