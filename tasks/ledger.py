"""Which run used which artifacts: one small file per run, so that they can be kept, named and counted.

    <store>/.ledger/<started>-<id>.json     an id begins with the fraction of the second: names are in order of time

A run writes its entry before it looks an artifact up, under the shared store lock. Collecting garbage takes that lock
exclusively, so an artifact that a run has found is never taken from under it.
"""

import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.errors import StoreError
from tasks.lease import Owner
from tasks.locks import locked
from tasks.record import utc
from tasks.store import ArtifactStore

FOLDER = ".ledger"
LOCK = ".collect.lock"
ABANDONED_SECONDS = 7 * 86400
"""An entry of another machine that says `running` counts as that for so long after its last change."""

type State = Literal["running", "completed", "failed", "cancelled"]
type Key = tuple[str, str]
"""(stage, key)"""


class Use(BaseModel):
    """One artifact that a run looked up."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: str
    key: str
    cached: bool | None = None
    """Served from the store, or computed by this run; None until it is there."""
    seconds: float = 0.0
    """That the run waited for it."""


class Entry(BaseModel):
    """What one run is, and what it used, in the order in which it asked."""

    model_config = ConfigDict(extra="forbid")

    id: str
    name: str
    started: str
    """UTC, ISO 8601."""
    ended: str | None = None
    state: State = "running"
    owner: dict[str, Any]
    uses: list[Use] = Field(default_factory=list)
    attempt_of: str | None = None
    """Equal in all attempts at one run."""

    @property
    def keys(self) -> set[Key]:
        return {(use.stage, use.key) for use in self.uses}

    def is_alive(self, changed: float) -> bool:
        """The run goes on, as far as can be known here; `changed` is when its file was last written (epoch)."""
        if self.state != "running" or Owner(**self.owner).is_dead():
            return False
        return Owner(**self.owner).is_here() or time.time() - changed < ABANDONED_SECONDS


class Run:
    """The entry of a run that goes on; every change is on the disk before the call returns. For any thread."""

    def __init__(self, store: ArtifactStore, name: str, attempt_of: str | None = None) -> None:
        """
        Args:
            name: Of the recipe.
            attempt_of: What is the same for each attempt at one run: its id for whoever retries it.
        """
        self._store = store
        earlier = [entry for entry, _ in entries(store) if attempt_of and entry.attempt_of == attempt_of]
        self._computed_before = {(use.stage, use.key) for entry in earlier for use in entry.uses if use.cached is False}
        self._changing = threading.Lock()
        now = time.time()
        started = utc(now)
        self.entry = Entry(
            id=f"{int(now % 1 * 1e4):04d}{uuid.uuid4().hex[:8]}",
            name=name,
            started=started,
            owner=asdict(Owner.me()),
            attempt_of=attempt_of,
        )
        self._path = store.root / FOLDER / f"{started.replace(':', '')}-{self.entry.id}.json"
        self._save()

    def computed_before(self, stage: str, key: str) -> bool:
        """Whether an earlier attempt at this run has computed the artifact."""
        return (stage, key) in self._computed_before

    @contextmanager
    def looking_up(self, stage: str, key: str) -> Iterator[None]:
        """Within this nothing is collected, and from here on not this artifact while the run goes on."""
        with store_lock(self._store, exclusive=False):
            with self._changing:
                if (stage, key) not in self.entry.keys:
                    self.entry.uses.append(Use(stage=stage, key=key))
                    self._save()
            yield

    def used(self, stage: str, key: str, *, cached: bool, seconds: float) -> None:
        """The artifact is there."""
        use = Use(stage=stage, key=key, cached=cached, seconds=round(seconds, 3))
        with self._changing:
            self.entry.uses = [use if (u.stage, u.key) == (stage, key) else u for u in self.entry.uses]
            self._save()

    def finish(self, state: State) -> None:
        with self._changing:
            self.entry.state = state
            self.entry.ended = utc()
            self._save()

    def withdraw(self) -> None:
        """Forget the run: it has found out that it goes on as another one."""
        self._path.unlink(missing_ok=True)

    def _save(self) -> None:
        with self._store.guard("cannot be written"):
            self._path.parent.mkdir(exist_ok=True)
            temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_text(self.entry.model_dump_json(indent=1) + "\n", encoding="utf-8")
            os.replace(temporary, self._path)


def begin(store: ArtifactStore, name: str, attempt_of: str | None = None) -> Run | None:
    """The entry of a new run; None where the store cannot be written: what it has is served all the same."""
    try:
        return Run(store, name, attempt_of)
    except (StoreError, OSError):
        return None


@contextmanager
def recorded(store: ArtifactStore, name: str, attempt_of: str | None = None) -> Iterator[Run | None]:
    """The entry of a run that is the block, and ends with it: completed, failed, or cancelled by a signal.

    None as of `begin`. A ledger that cannot be written at the end changes nothing: the entry's process is dead soon.
    """
    run = begin(store, name, attempt_of)
    state: State = "cancelled"
    try:
        yield run
        state = "completed"
    except Exception:
        state = "failed"
        raise
    finally:
        if run is not None:
            with suppress(StoreError, OSError):
                run.finish(state)


def users(store: ArtifactStore) -> dict[Key, list[Entry]]:
    """The runs that used each artifact, the newest first."""
    found: dict[Key, list[Entry]] = {}
    for entry, _ in entries(store):
        for key in entry.keys:
            found.setdefault(key, []).append(entry)
    return found


def entries(store: ArtifactStore) -> list[tuple[Entry, bool]]:
    """(entry, goes on) of every run that the ledger knows, the newest first; what cannot be read is left out."""
    found = []
    for path in sorted((store.root / FOLDER).glob("*.json"), reverse=True):
        try:
            entry = Entry.model_validate_json(path.read_bytes())
            found.append((entry, entry.is_alive(path.stat().st_mtime)))
        except (OSError, ValidationError, TypeError):
            continue
    return found


def store_lock(store: ArtifactStore, *, exclusive: bool) -> AbstractContextManager[None]:
    """Shared while artifacts are looked up, exclusive while some are moved away; the kernel frees it at a crash."""
    return locked(store, store.root / LOCK, exclusive=exclusive)


def ledger_path(store: ArtifactStore, entry: Entry) -> Path:
    """File of an entry."""
    return store.root / FOLDER / f"{entry.started.replace(':', '')}-{entry.id}.json"
