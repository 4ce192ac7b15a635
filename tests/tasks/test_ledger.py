"""The ledger: what a run used, and how it ended, whatever happens to it."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from tasks import ledger
from tasks.errors import Cancelled
from tasks.ledger import entries, recorded, users
from tasks.stage import ensure
from tasks.store import ArtifactStore
from tests.tasks.toys import Letter


@pytest.mark.parametrize(
    ("error", "state"),
    [(None, "completed"), (ValueError, "failed"), (KeyboardInterrupt, "cancelled"), (Cancelled, "cancelled")],
)
def test_a_run_that_ends_is_not_running(tmp_path: Path, error: type[BaseException] | None, state: str) -> None:
    store = ArtifactStore(tmp_path / "store")
    with pytest.raises(error) if error else nullcontext(), recorded(store, "demo") as run:
        artifact = ensure(store, Letter("a"), run=run).artifact
        if error is not None:
            raise error
    ((entry, is_alive),) = entries(store)
    assert (entry.name, entry.state, is_alive, entry.ended is not None) == ("demo", state, False, True)
    assert users(store) == {("letter", artifact.key): [entry]}


def test_a_store_that_cannot_be_written_serves_a_run_without_an_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ArtifactStore(tmp_path / "store")
    made = ensure(store, Letter("a")).artifact

    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(ledger.os, "replace", refuse)
    with recorded(store, "demo") as run:
        assert run is None
        assert ensure(store, Letter("a"), run=run).artifact.key == made.key
