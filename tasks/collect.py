"""Collecting garbage: what no run, name or pin needs is moved to the trash at once, and then removed.

Kept are the artifacts that are

- named: the present holder of every alias, and the ones before it that `rollback` may want;
- pinned;
- used by a run that goes on, or by one of the last runs;
- young: whoever uses the library without a ledger has that long;

and all that these were made of. Under the exclusive store lock nothing is looked up, so between the decision and the
move no run can find an artifact that goes. Removing the bytes takes longer, and happens after the lock.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tasks.aliases import Aliases
from tasks.lease import any_held, is_held
from tasks.ledger import entries, ledger_path, store_lock
from tasks.pins import pins
from tasks.record import RECORD_NAME, UnreadableRecord, load
from tasks.store import ArtifactStore

TRASH = ".trash"
type Key = tuple[str, str]
"""(stage, key)"""


@dataclass(frozen=True)
class Policy:
    """How much is kept beyond what is named or pinned."""

    runs: int = 10
    """Artifacts of so many of the last runs."""
    promotions: int = 3
    """Holders of an alias, the present one included."""
    young_seconds: float = 3600.0
    """Artifacts and leftovers that are younger."""


@dataclass(frozen=True)
class Item:
    """Something to remove: an artifact, or a folder that a run left behind."""

    name: str
    """stage/key, or the folder's path below the store."""
    path: Path
    size: int
    """Bytes of its files."""
    why: str


@dataclass
class Collection:
    """What goes and what stays."""

    items: list[Item] = field(default_factory=list)
    kept: dict[Key, str] = field(default_factory=dict)
    """Why each artifact stays."""

    @property
    def size(self) -> int:
        return sum(item.size for item in self.items)


def survey(store: ArtifactStore, policy: Policy) -> Collection:
    """What `collect` would do now. Changes nothing."""
    kept = _closure(store, dict(_roots(store, policy)))
    now = time.time()
    found = Collection(kept=kept)
    for stage, key in store.addresses():
        path = store.location(stage, key)
        if (stage, key) in kept:
            continue
        if now - path.stat().st_mtime < policy.young_seconds or any_held(store.leases, f"{stage}-{key}"):
            kept[stage, key] = "young"
            kept |= {k: "needed by a young artifact" for k in _closure(store, {(stage, key): ""}) if k not in kept}
    for stage, key in store.addresses():
        if (stage, key) not in kept:
            path = store.location(stage, key)
            found.items.append(Item(f"{stage}/{key}", path, folder_size(path), "no run, name or pin needs it"))
    found.items += _leftovers(store, policy, now, kept)
    return found


def collect(store: ArtifactStore, policy: Policy) -> Collection:
    """Remove what `survey` says, as it is when the lock is taken; what is being looked up meanwhile waits."""
    trash = store.root / TRASH
    with store.guard("cannot be written"):
        trash.mkdir(exist_ok=True)
        with store_lock(store, exclusive=True):
            found = survey(store, policy)
            for number, item in enumerate(found.items):
                if item.path.parent != trash:
                    with contextlib.suppress(FileNotFoundError):
                        os.rename(item.path, trash / f"{time.time_ns()}-{number}-{item.path.name}")
            _forget_runs(store, policy)
        for path in trash.iterdir():
            _remove(path)
    return found


def folder_size(path: Path) -> int:
    """Bytes of all files below a folder, or of a file; links are not followed."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_size
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def _roots(store: ArtifactStore, policy: Policy) -> Iterator[tuple[Key, str]]:
    ledger = entries(store)
    for number, (entry, is_alive) in enumerate(ledger):
        if number < policy.runs:
            yield from ((key, f"used by a run of {entry.name}, {entry.started}") for key in entry.keys)
        if is_alive:
            yield from ((key, f"in use by {entry.name}") for key in entry.keys)
    for key, reason in pins(store).items():
        yield key, f"pinned{f': {reason}' if reason else ''}"
    for model, alias, history in Aliases(store).all():
        for promotion in history[-policy.promotions :]:
            yield (promotion.stage, promotion.key), f"was {model}/{alias}"
        yield (history[-1].stage, history[-1].key), f"is {model}/{alias}"


def _closure(store: ArtifactStore, roots: dict[Key, str]) -> dict[Key, str]:
    """The roots, and all that they were made of."""
    kept, open_ = dict(roots), list(roots)
    while open_:
        stage, key = open_.pop()
        try:
            record = load(store.location(stage, key) / RECORD_NAME, stage, key)
        except UnreadableRecord:
            continue
        for entry in record.inputs.values():
            if (entry.stage, entry.key) not in kept:
                kept[entry.stage, entry.key] = f"{stage}/{key[:12]} was made of it"
                open_.append((entry.stage, entry.key))
    return kept


def _leftovers(store: ArtifactStore, policy: Policy, now: float, kept: dict[Key, str]) -> Iterator[Item]:
    """Folders that no run uses: damaged artifacts, work of runs that were never tried again, logs of trainings whose
    artifact is gone, the trash. Runs clear such folders away themselves, so each may go while it is looked at."""
    kinds = {
        ".quarantine": "was damaged or replaced",
        ".work": "left by a run",
        ".runs": "logs of an artifact that is gone",
        ".staging": "left by a run",
        TRASH: "trash",
    }
    for folder, why in kinds.items():
        root = store.root / folder
        for path in sorted(root.iterdir()) if root.is_dir() else ():
            stage, _, key = path.name.rpartition("-")
            holder = path.name.rpartition(".")[0]
            used = folder in (".work", ".runs") and ((stage, key) in kept or any_held(store.leases, path.name))
            used = used or (folder == ".staging" and bool(holder) and is_held(store.leases / holder))
            used = used or (folder == ".runs" and store.location(stage, key).exists())
            with contextlib.suppress(FileNotFoundError):
                if folder == TRASH or (not used and now - _newest(path) >= policy.young_seconds):
                    yield Item(f"{folder}/{path.name}", path, folder_size(path), why)


def _newest(path: Path) -> float:
    """When the newest thing in a folder was changed, epoch seconds."""
    return max((p.lstat().st_mtime for p in path.rglob("*")), default=path.lstat().st_mtime)


def _forget_runs(store: ArtifactStore, policy: Policy) -> None:
    """Entries of ended runs beyond a hundred times as many as are kept alive: the ledger stays small."""
    ended = [entry for entry, is_alive in entries(store) if not is_alive]
    for entry in ended[100 * max(policy.runs, 1) :]:
        ledger_path(store, entry).unlink(missing_ok=True)


def _remove(path: Path) -> None:
    """A folder of an artifact may be read-only, as its files are."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for folder, _, _ in os.walk(path):
        os.chmod(folder, 0o755)
    shutil.rmtree(path, ignore_errors=True)
