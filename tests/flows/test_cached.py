"""A run for which the store has everything, on the command line without a server: no Prefect, and the same answers."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cached import may_have_server, run_cached
from flows.graph import nodes_of
from flows.recipe import PipelineConfig
from tasks import ledger
from tasks.aliases import Aliases
from tasks.errors import StoreError
from tasks.ledger import entries
from tasks.store import ArtifactStore
from tests.flows.finished import Run

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from pathlib import Path
from flows.commands import run_recipe
run_recipe(Path(sys.argv[1]), [], refresh=[])
print("loaded:", *sorted({"prefect", "torch", "transformers", "httpx"} & set(sys.modules)))
"""


def test_it_loads_no_prefect_and_is_in_the_ledger(
    run: Run, write_recipe: Callable[[PipelineConfig], Path], tmp_path: Path
):
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env |= {"PREFECT_HOME": str(tmp_path / "prefect"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(write_recipe(run.config))]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()[:6]] == ["cached"] * 6
    assert "held-out loss" in done.stdout
    assert done.stdout.splitlines()[-1] == "loaded:"
    assert not (tmp_path / "prefect").exists()
    ((entry, _), *_) = entries(ArtifactStore(run.config.store.path))
    assert (entry.state, [use.cached for use in entry.uses]) == ("completed", [True] * 6)
    assert [use.stage for use in entry.uses] == list(nodes_of(run.config))


def test_with_something_to_compute_it_leaves_no_trace(run: Run):
    store = ArtifactStore(run.config.store.path)
    before = [entry.id for entry, _ in entries(store)]
    assert run_cached(run.with_fields(eval={"max_rows": 7}), None) is None
    assert run_cached(run.with_fields(eval={"max_rows": 7}), "export") is not None
    shutil.rmtree(store.root / "convert")
    assert run_cached(run.config, None) is None
    assert [entry.id for entry, _ in entries(store)][1:] == before


def test_a_store_that_cannot_be_written_serves(run: Run, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise StoreError("read-only")

    monkeypatch.setattr(ledger, "Run", refuse)
    found = run_cached(run.config, None)
    assert found is not None
    assert {name: outcome.artifact.key for name, outcome in found.outcomes.items()} == {
        name: outcome.artifact.key for name, outcome in run.result.outcomes.items()
    }


def test_it_promotes_what_needs_no_measuring(run: Run):
    config = run.with_fields(promote={"model": "chat", "gate": ["heldout_loss < production"]})
    store = ArtifactStore(run.config.store.path)
    trained = run.result.outcomes["export"].artifact
    for _ in range(2):
        found = run_cached(config, None)
        assert found is not None
        assert found.verdict is not None
        assert found.verdict.decision.promoted.key == trained.key
    assert len(Aliases(store).history("chat")) == 1
    # Another holder, which nobody has measured on these rows: that is work for a run.
    record = trained.record.model_copy(update={"key": "0" * 32})
    shutil.copytree(trained.path, store.location("export", record.key))
    Aliases(store).promote("chat", type(trained)(record, store.location("export", record.key)))
    assert run_cached(run.with_fields(promote={"model": "chat", "push_to": str(run.folder)}), None) is None


@pytest.mark.parametrize(
    ("variables", "files", "expected"),
    [
        ({}, {}, False),
        ({"PREFECT_API_URL": "http://127.0.0.1:4200/api"}, {}, True),
        ({"PREFECT_PROFILE": "ours"}, {}, True),
        ({}, {"home/profiles.toml": 'active = "ours"\n[profiles.ours]\nPREFECT_API_URL = "http://a/api"\n'}, True),
        ({}, {"home/profiles.toml": 'active = "ephemeral"\n[profiles.ephemeral]\n'}, False),
        ({}, {".env": "PREFECT_API_URL=http://a/api\n"}, True),
        ({}, {"prefect.toml": "[api]\n"}, True),
        ({}, {"pyproject.toml": "[tool.prefect.api]\n"}, True),
        ({}, {"pyproject.toml": "[tool.ruff]\n", ".env": "HF_HOME=/data\n"}, False),
    ],
)
def test_whether_a_server_may_be_configured(
    variables: dict[str, str], files: dict[str, str], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert may_have_server() is expected
