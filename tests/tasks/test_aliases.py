"""Names of models: one holder at a time, decided under a lock, with a way back."""

import json
import os
from pathlib import Path

import pytest

from tasks.aliases import Aliases
from tasks.errors import StoreError
from tasks.stage import Artifact, ensure
from tasks.store import ArtifactStore
from tests.tasks.toys import Letter, start


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def make(store: ArtifactStore, text: str) -> Artifact:
    return ensure(store, Letter(text)).artifact


def test_the_holder_changes_and_comes_back(store: ArtifactStore) -> None:
    names, a, b, c = Aliases(store), *(make(store, t) for t in "abc")
    assert names.current("chat") is None
    for artifact in (a, b):
        assert names.promote("chat", artifact, run="r", metrics={"loss": 1.5}).promoted.key == artifact.key
    assert (store.root / ".models/chat/production/folder0/0.txt").read_text().startswith("b 0")
    assert names.rollback("chat").promoted.key == a.key
    assert (store.root / ".models/chat/production/folder0/0.txt").read_text().startswith("a 0")
    names.promote("chat", c)
    assert names.rollback("chat").promoted.key == a.key  # not b, which was rolled back
    assert [(p.key == a.key, p.rollback) for p in names.history("chat")] == [
        (True, False),
        (False, False),
        (True, True),
        (False, False),
        (True, True),
    ]
    with pytest.raises(StoreError, match="nothing to go back to"):
        names.rollback("chat")
    assert [(model, alias, len(history)) for model, alias, history in names.all()] == [("chat", "production", 5)]


def test_promoting_the_holder_changes_nothing_and_mends_its_link(store: ArtifactStore) -> None:
    names, a = Aliases(store), make(store, "a")
    names.promote("chat", a)
    (store.root / ".models/chat/production").unlink()  # as a crash between file and link leaves it
    assert names.promote("chat", a, refusals=lambda current: ("never asked",)).promoted is not None
    assert len(names.history("chat")) == 1
    assert (store.root / ".models/chat/production").is_dir()


def test_a_refusal_keeps_the_holder(store: ArtifactStore) -> None:
    names, a, b = Aliases(store), make(store, "a"), make(store, "b")
    names.promote("chat", a)
    decision = names.promote("chat", b, refusals=lambda current: (f"worse than {current.key}",))
    assert decision.promoted is None
    assert decision.refusals == (f"worse than {a.key}",)
    assert names.current("chat").key == a.key


def test_two_runs_cannot_both_win_against_the_same_holder(store: ArtifactStore) -> None:
    """Each promotes only over the holder whose number is one less than its own: under a race some would repeat."""
    code = "from tasks.aliases import Aliases\ns = ArtifactStore(sys.argv[1]); n = Aliases(s)\n"
    code += "for i in range(20):\n"
    code += "    a = ensure(s, Letter(f'{sys.argv[2]} {i}', files=1)).artifact\n"
    code += "    seen = []\n"
    code += "    n.promote('chat', a, refusals=lambda c: (seen.append(c and c.key), ())[1], run=sys.argv[2])\n"
    code += "    print(seen[0])\n"
    runs = [start(code, store.root, name) for name in "ab"]
    outputs = [run.communicate(timeout=60)[0].split() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    history = [promotion.key for promotion in Aliases(store).history("chat")]
    assert len(history) == 40
    assert sorted(outputs[0] + outputs[1]) == sorted(["None", *history[:-1]])


def test_a_model_that_is_gone_is_not_gone_back_to(store: ArtifactStore) -> None:
    names, a, b = Aliases(store), make(store, "a"), make(store, "b")
    for artifact in (a, b):
        names.promote("chat", artifact)
    os.rename(a.path, store.root / "elsewhere")
    with pytest.raises(StoreError, match="no longer whole"):
        names.rollback("chat")
    assert names.current("chat").key == b.key


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 101, "a b"])
def test_a_name_that_is_a_path_is_refused(store: ArtifactStore, name: str) -> None:
    for call in (lambda: Aliases(store).current(name), lambda: Aliases(store).history("chat", name)):
        with pytest.raises(StoreError, match="cannot be the name"):
            call()


def test_a_history_that_cannot_be_read_is_not_overwritten(store: ArtifactStore) -> None:
    names, a = Aliases(store), make(store, "a")
    names.promote("chat", a)
    path = store.root / ".models/chat/production.json"
    path.write_text(json.dumps({"promotions": "none"}))
    with pytest.raises(StoreError, match="restore it from a backup"):
        names.promote("chat", make(store, "b"))
