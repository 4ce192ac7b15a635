"""Collecting garbage: what is needed stays, what is not goes, and no run loses what it has found."""

import os
import threading
import time
from pathlib import Path

import pytest

from tasks.aliases import Aliases
from tasks.collect import Policy, collect, survey
from tasks.ledger import Run, entries, store_lock
from tasks.pins import pin, pins, unpin
from tasks.stage import Artifact, ensure
from tasks.store import ArtifactStore
from tests.tasks.toys import Copy, Letter, start, whole

OLD = Policy(runs=0, promotions=2, young_seconds=0)
"""Nothing is kept but what is named, pinned or in use."""


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def make(store: ArtifactStore, text: str, run: Run | None = None) -> tuple[Artifact, Artifact]:
    """A letter, and the copy that was made of it."""
    letter = ensure(store, Letter(text), run=run).artifact
    return letter, ensure(store, Copy(letter), run=run).artifact


def names(found) -> set[str]:
    return {item.name for item in found.items}


def test_what_nobody_needs_goes_and_is_listed_first(store: ArtifactStore) -> None:
    letter, copy = make(store, "a")
    planned = survey(store, OLD)
    assert names(planned) == {f"letter/{letter.key}", f"copy/{copy.key}"}
    assert planned.size > 600
    assert len(store.ls()) == 2
    assert names(collect(store, OLD)) == names(planned)
    assert store.ls() == []
    assert not any((store.root / ".trash").iterdir())


def test_the_young_stay(store: ArtifactStore) -> None:
    letter, copy = make(store, "a")
    old = time.time() - 3 * 3600
    os.utime(store.location("letter", letter.key), (old, old))
    kept = survey(store, Policy(runs=0)).kept
    assert kept["copy", copy.key] == "young"
    assert "needed by a young" in kept["letter", letter.key]  # though it is old itself


@pytest.mark.parametrize("how", ["pin", "name", "run"])
def test_what_is_named_pinned_or_used_stays_with_all_it_was_made_of(store: ArtifactStore, how: str) -> None:
    run = Run(store, "demo")
    letter, copy = make(store, "a", run if how == "run" else None)
    run.finish("completed")
    other, _ = make(store, "b")
    policy = OLD
    if how == "pin":
        pin(store, copy, "of the paper")
    elif how == "name":
        Aliases(store).promote("demo", copy)
    else:
        policy = Policy(runs=1, young_seconds=0)
    found = collect(store, policy)
    assert set(found.kept) == {("letter", letter.key), ("copy", copy.key)}
    assert f"letter/{other.key}" in names(found)
    assert {a.key for a in store.ls()} == {letter.key, copy.key}


def test_a_pin_can_be_taken_away(store: ArtifactStore) -> None:
    letter, _ = make(store, "a")
    pin(store, letter, "mine")
    assert pins(store) == {("letter", letter.key): "mine"}
    assert unpin(store, letter)
    assert not unpin(store, letter)
    collect(store, OLD)
    assert store.ls() == []


def test_a_run_that_goes_on_keeps_what_it_asked_for(store: ArtifactStore) -> None:
    make(store, "a")
    run = Run(store, "demo")
    make(store, "a", run)
    assert len(collect(store, OLD).items) == 0
    run.finish("failed")
    assert len(collect(store, OLD).items) == 2
    assert [(entry.name, entry.state, alive) for entry, alive in entries(store)] == [("demo", "failed", False)]
    assert [(use.stage, use.cached) for use in entries(store)[0][0].uses] == [("letter", True), ("copy", True)]


def test_a_killed_run_keeps_nothing(store: ArtifactStore) -> None:
    make(store, "a")
    code = "from tasks.ledger import Run; s = ArtifactStore(sys.argv[1])\n"
    code += "ensure(s, Letter('a'), run=Run(s, 'killed')); print('used', flush=True); signal.pause()"
    process = start(code, store.root)
    assert process.stdout.readline() == "used\n"
    assert "letter" in {stage for stage, _ in survey(store, OLD).kept}
    process.kill()
    process.wait()
    assert survey(store, OLD).kept == {}


def test_a_lookup_waits_for_a_collection_and_then_computes(store: ArtifactStore) -> None:
    make(store, "a")
    run, outcomes = Run(store, "demo"), []
    with store_lock(store, exclusive=True):
        asking = threading.Thread(target=lambda: outcomes.append(ensure(store, Letter("a"), run=run)))
        asking.start()
        asking.join(0.2)
        assert asking.is_alive()
    asking.join(20)
    assert outcomes[0].cached


def test_runs_under_repeated_collections_lose_nothing(store: ArtifactStore) -> None:
    code = "from tasks.ledger import Run; s = ArtifactStore(sys.argv[1])\n"
    code += "for i in range(12):\n"
    code += "    run = Run(s, 'r'); a = ensure(s, Letter(f'text {i % 3}'), run=run).artifact\n"
    code += "    b = ensure(s, Copy(a), run=run).artifact\n"
    code += "    assert sorted(p.name for p in b.path.iterdir()) == ['.artifact.json', 'copy.txt'], b.path\n"
    code += "    assert len((b.path / 'copy.txt').read_text()) > 1000; run.finish('completed')\n"
    runs = [start(code, store.root) for _ in range(2)]
    rounds = 0
    while any(run.poll() is None for run in runs):
        collect(store, OLD)
        rounds += 1
    assert [(run.returncode, run.stdout.read()) for run in runs] == [(0, ""), (0, "")]
    assert rounds > 3
    assert whole(store)


def test_leftovers_of_dead_runs_go_and_those_of_the_living_stay(store: ArtifactStore) -> None:
    letter, _ = make(store, "a")
    for name in (".work/copy-dead", ".quarantine/x", ".staging/.import-1", f".runs/letter-{letter.key}"):
        (store.root / name).mkdir(parents=True, exist_ok=True)
        (store.root / name / "file").write_text("x" * 10)
    pin(store, letter)
    assert names(survey(store, Policy(runs=0))) == set()
    found = collect(store, OLD)
    assert {n for n in names(found) if n.startswith(".")} == {".work/copy-dead", ".quarantine/x", ".staging/.import-1"}
    assert (store.root / ".runs" / f"letter-{letter.key}").is_dir()
