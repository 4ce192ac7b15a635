"""Names for models: `production` of a model is one artifact at a time, and its history is kept.

    <store>/.models/<model>/<alias>.json     the history, the newest last; replaced atomically
    <store>/.models/<model>/<alias>          a link to the artifact's folder, for servers that load from a path

The file is the truth: a link that a crash left behind is mended by the next change. Changes of one model take a lock,
within which the caller decides, so two runs cannot both win against the same predecessor.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.errors import StoreError
from tasks.locks import locked
from tasks.record import utc
from tasks.store import Artifact, ArtifactStore

FOLDER = ".models"
PRODUCTION = "production"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}")


class Promotion(BaseModel):
    """One artifact that got a name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: str
    key: str
    digest: str
    time: str
    """UTC, ISO 8601."""
    run: str = ""
    """Who did it: the name of a run, or of a command."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """What was measured of it when it was promoted."""
    rollback: bool = False
    """It had the name before, and got it back."""


class _History(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = 1
    promotions: list[Promotion] = Field(default_factory=list)


@dataclass(frozen=True)
class Decision:
    """What `promote` did: the new holder of the name, or why there is none."""

    promoted: Promotion | None
    before: Promotion | None
    refusals: tuple[str, ...] = ()


class Aliases:
    """The names of one store."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._root = store.root / FOLDER

    def history(self, model: str, alias: str = PRODUCTION) -> list[Promotion]:
        """All that had the name, the present one last; empty where there is none.

        Raises StoreError for a name that cannot be one, and for a history that cannot be read.
        """
        path = self._file(model, alias)
        try:
            return _History.model_validate_json(path.read_bytes()).promotions
        except FileNotFoundError:
            return []
        except (OSError, ValidationError) as error:
            raise StoreError(f"{path}: not readable ({str(error).splitlines()[0]}); restore it from a backup") from None

    def current(self, model: str, alias: str = PRODUCTION) -> Promotion | None:
        history = self.history(model, alias)
        return history[-1] if history else None

    def withdrawn(self, model: str, alias: str = PRODUCTION) -> set[tuple[str, str, str]]:
        """(stage, key, digest) of what was rolled back and has not been promoted since."""
        found: set[tuple[str, str, str]] = set()
        holders: list[Promotion] = []
        for promotion in self.history(model, alias):
            if promotion.rollback:
                found.add(identity(holders.pop()))
            else:
                holders.append(promotion)
            found.discard(identity(promotion))
        return found

    def all(self) -> Iterator[tuple[str, str, list[Promotion]]]:
        """(model, alias, history) of every name in the store."""
        for path in sorted(self._root.glob("*/*.json")):
            yield path.parent.name, path.stem, self.history(path.parent.name, path.stem)

    def promote(
        self,
        model: str,
        artifact: Artifact,
        *,
        alias: str = PRODUCTION,
        run: str = "",
        metrics: dict[str, float] | None = None,
        refusals: Callable[[Promotion | None], tuple[str, ...]] = lambda current: (),
    ) -> Decision:
        """Give the artifact the name, unless `refusals` of the present holder, called under the lock, says why not.

        The holder itself keeps the name, and nothing is written.
        """
        with self.locked(model):
            history = self.history(model, alias)
            before = history[-1] if history else None
            if before is not None and identity(before) == identity(artifact):
                self._link(model, alias, before)
                return Decision(before, before)
            if found := refusals(before):
                return Decision(None, before, found)
            promotion = Promotion(
                stage=artifact.stage,
                key=artifact.key,
                digest=artifact.digest,
                time=utc(),
                run=run,
                metrics=metrics or {},
            )
            self._write(model, alias, [*history, promotion])
            return Decision(promotion, before)

    def rollback(self, model: str, *, alias: str = PRODUCTION, run: str = "") -> Decision:
        """Give the name back to who had it before the present holder, as a new line of the history.

        Going back twice goes two back: promotions that were rolled back are skipped.

        Raises:
            StoreError: nobody had the name before, or that artifact is no longer whole in the store.
        """
        with self.locked(model):
            history = self.history(model, alias)
            target = _before(history)
            if target is None:
                raise StoreError(f"{model}/{alias}: nothing to go back to; {len(history)} promotions are on record")
            found = self._store.get(target.stage, target.key)
            if found is None or found.digest != target.digest:
                raise StoreError(
                    f"{model}/{alias}: {target.stage}/{target.key[:12]} is no longer whole in the store; run its "
                    "recipe again, or promote another artifact"
                )
            back = target.model_copy(update={"time": utc(), "run": run, "rollback": True})
            self._write(model, alias, [*history, back])
            return Decision(back, history[-1])

    def _write(self, model: str, alias: str, history: list[Promotion]) -> None:
        path = self._file(model, alias)
        with self._store.guard("cannot be written"):
            temporary = path.with_suffix(f".{os.getpid()}.tmp")
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(_History(promotions=history).model_dump_json(indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        self._link(model, alias, history[-1])

    def _link(self, model: str, alias: str, promotion: Promotion) -> None:
        link = self._root / model / alias
        target = os.path.relpath(self._store.location(promotion.stage, promotion.key), link.parent)
        if link.is_symlink() and os.readlink(link) == target:
            return
        with self._store.guard("cannot be written"):
            temporary = link.with_name(f"{alias}.{os.getpid()}.tmp")
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(target)
            os.replace(temporary, link)

    @contextmanager
    def locked(self, model: str) -> Iterator[None]:
        """Within this nobody else changes a name of the model."""
        folder = self._file(model, PRODUCTION).parent
        with self._store.guard("cannot be written"):
            folder.mkdir(parents=True, exist_ok=True)
        with locked(self._store, folder / ".lock"):
            yield

    def _file(self, model: str, alias: str) -> Path:
        for kind, name in (("model", model), ("alias", alias)):
            if not _NAME.fullmatch(name):
                raise StoreError(
                    f"{name!r:.80} cannot be the name of a {kind}: letters, digits, '.', '_' and '-' alone"
                )
        return self._root / model / f"{alias}.json"


def identity(named: Promotion | Artifact) -> tuple[str, str, str]:
    """What is equal where a promotion is of an artifact: the key, and the very content."""
    return named.stage, named.key, named.digest


def _before(history: list[Promotion]) -> Promotion | None:
    """The holder to go back to: a rollback undoes the promotion before it, as one closing bracket after another."""
    holders: list[Promotion] = []
    for promotion in history:
        if promotion.rollback:
            holders.pop()
        else:
            holders.append(promotion)
    return holders[-2] if len(holders) > 1 else None
