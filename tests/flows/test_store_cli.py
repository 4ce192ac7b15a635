"""The commands that keep a store in order, as a person calls them."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.store_commands import seconds_of
from mca_lib.errors import ConfigError, UserError
from tasks.stage import ensure
from tasks.store import ArtifactStore
from tests.tasks.toys import Copy, Exported, Letter, whole


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    store = ArtifactStore(tmp_path / "store")
    for text in "ab":
        ensure(store, Copy(ensure(store, Letter(text)).artifact))
    return store


def mcaflow(store: ArtifactStore, *arguments: str) -> str:
    """Output of a command; a refusal is raised, as `main` gets it."""
    result = CliRunner().invoke(app, [*arguments, "--store", str(store.root)])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_gc_lists_first_and_removes_when_told(store: ArtifactStore) -> None:
    kept = store.ls("copy")[0]
    mcaflow(store, "pin", kept.key, "--reason", "paper")
    assert f"copy/{kept.key[:12]}  paper" in mcaflow(store, "pin")
    listed = mcaflow(store, "gc", "--min-age", "0s", "--keep-runs", "0")
    assert "2 would be removed" in listed
    assert "2 artifacts stay" in listed
    assert len(store.ls()) == 4
    assert "2 removed" in mcaflow(store, "gc", "--min-age", "0s", "--keep-runs", "0", "--delete")
    assert len(store.ls()) == 2
    assert whole(store)
    mcaflow(store, "unpin", kept.key)
    with pytest.raises(ConfigError, match="is not pinned"):
        mcaflow(store, "unpin", kept.key)
    assert "0 would be removed" in mcaflow(store, "gc")  # young


def test_a_name_is_given_shown_and_given_back(store: ArtifactStore) -> None:
    for text in "ab":
        ensure(store, Exported(text))
    first, second = (artifact.key for artifact in store.ls("export"))
    mcaflow(store, "promote", first, "chat")
    said = mcaflow(store, "promote", second, "chat")
    assert f"chat/production is export/{second[:12]}, was export/{first[:12]}" in said
    assert f"chat/production is export/{first[:12]}" in mcaflow(store, "rollback", "chat")
    assert first[:12] in mcaflow(store, "models")
    history = mcaflow(store, "models", "chat")
    assert history.count("production") == 3
    assert "rollback" in history
    with pytest.raises(ConfigError, match="is no exported model"):
        mcaflow(store, "promote", store.ls("copy")[0].key, "chat")
    with pytest.raises(ConfigError, match="no model of this name"):
        mcaflow(store, "models", "other")


def test_an_artifact_travels_as_a_file_and_through_a_remote_store(store: ArtifactStore, tmp_path: Path) -> None:
    key = store.ls("copy")[0].key
    assert "2 artifacts" in mcaflow(store, "pack", key, str(tmp_path / "x.tar"))
    other = ArtifactStore(tmp_path / "other")
    assert mcaflow(other, "unpack", str(tmp_path / "x.tar")).count("imported") == 2
    assert whole(other)
    assert mcaflow(store, "push", key, f"file://{tmp_path}/shared").count("is there") == 2
    third = ArtifactStore(tmp_path / "third", remote=f"file://{tmp_path}/shared")
    assert ensure(third, Letter("a")).cached


def test_du_says_what_takes_the_space(store: ArtifactStore) -> None:
    (store.root / ".work" / "x").mkdir(parents=True)
    (store.root / ".work" / "x" / "file").write_bytes(b"x" * 5000)
    said = mcaflow(store, "du")
    assert [line.split()[:2] for line in said.splitlines() if line.split()[0] in ("copy", "letter")] == [
        ["copy", "2"],
        ["letter", "2"],
    ]
    assert "5.0 kB" in said


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("7d", 604800)])
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1s", "nan", "1w", "1e99d"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ConfigError, match="no duration"):
        seconds_of(text)
