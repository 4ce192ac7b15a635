"""The command line: instant help, honest exit codes, and one line on stderr for a mistake of the user."""

import io
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from flows.console import run_console
from flows.reporting import StageReporter
from mca_lib.demo_assets import make_demo_assets
from tasks.record import RECORD_NAME, dumps
from tasks.store import ArtifactStore
from tests.flows.finished import Run

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Workspace:
    """A folder with the demonstration's assets and a recipe that could run."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def data(self) -> Path:
        return self.folder / "data.json"

    def edit_config(self, **changes: object) -> None:
        path = self.model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    make_demo_assets(folder)
    return folder


@pytest.fixture
def workspace(assets: Path, tmp_path: Path) -> Workspace:
    folder = tmp_path / "work"
    shutil.copytree(assets, folder)
    recipe = {
        "model": {"name_or_path": "model"},
        "dataset": {"files": ["data.json"], "template": "chatml", "cutoff_len": 128},
        "training": {"max_steps": 2},
        "store": {"path": "store"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return Workspace(folder)


def mcaflow(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in `folder`, as a shell would."""
    env = os.environ | {"PREFECT_API_URL": "http://127.0.0.1:1/api"}
    env.pop("COLUMNS", None)
    command = [sys.executable, "-m", "flows.cli", *arguments]
    return subprocess.run(command, cwd=folder, env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


def rows(*changes: object) -> str:
    good = [{"instruction": f"Say {i}.", "input": "", "output": f"{i}"} for i in range(20)]
    return json.dumps([*good, *changes])


def write_data(text: str) -> Callable[[Workspace], None]:
    return lambda workspace: workspace.data.write_text(text)


def malformed_jsonl(workspace: Workspace) -> None:
    good = json.dumps({"instruction": "a", "input": "", "output": "b"})
    (workspace.folder / "rows.jsonl").write_text("\n".join([good, good, '{"instruction": "a", ', good]))


def edit(**changes: object) -> Callable[[Workspace], None]:
    return lambda workspace: workspace.edit_config(**changes)


def nothing(workspace: Workspace) -> None:
    pass


BAD_INPUT: dict[str, tuple[Callable[[Workspace], None], list[str], str]] = {
    "unknown model type": (edit(model_type="gpt2"), [], "model_type='gpt2'"),
    "missing model": (nothing, ["model.name_or_path=nowhere", "model.source=local"], "nowhere"),
    "missing weights": (lambda w: (w.model / "model.safetensors").unlink(), [], "model"),
    "truncated weights": (lambda w: os.truncate(w.model / "model.safetensors", 5000), [], "model.safetensors"),
    "config.json that is no JSON": (lambda w: (w.model / "config.json").write_text("{"), [], "config.json"),
    "unmapped config field": (edit(rope_scaling={"rope_type": "yarn", "factor": 2.0}), [], "rope"),
    "missing file": (nothing, ["dataset.files=[nowhere.json]"], "nowhere.json"),
    "malformed JSON": (write_data('[{"instruction": "a",]'), [], "data.json"),
    "malformed JSON row": (malformed_jsonl, ["dataset.files=[rows.jsonl]"], "rows.jsonl:3"),
    "missing column": (write_data(rows({"instruction": "a", "input": ""})), [], "data.json"),
    "wrong column map": (nothing, ["dataset.columns={prompt: question}"], "question"),
    "row that is no text": (write_data(rows({"instruction": "a", "input": "", "output": 3})), [], "data.json"),
    "empty file": (write_data(""), [], "data.json"),
    "empty data set": (write_data("[]"), [], "data.json"),
    "unknown template": (nothing, ["dataset.template=chatlm"], "dataset.template: unknown template 'chatlm'"),
    "heads not divisible": (
        nothing, ["parallel.tensor=3", "launcher.nproc_per_node=3", "training.global_batch_size=3"], "parallel.tensor",
    ),
    "layers not divisible": (
        nothing, ["parallel.pipeline=3", "launcher.nproc_per_node=3", "training.global_batch_size=3"],
        "parallel.pipeline",
    ),
    "cutoff beyond the positions": (nothing, ["dataset.cutoff_len=100000"], "dataset.cutoff_len: 100000"),
    "world size not divisible": (
        nothing, ["launcher.nproc_per_node=3", "parallel.tensor=2"], "launcher.nproc_per_node: 3"
    ),
    "batch not divisible": (nothing, ["training.micro_batch_size=3"], "training.global_batch_size: 8"),
    "unknown field": (nothing, ["training.learnin_rate=1"], "did you mean learning_rate?"),
    "store that is a file": (lambda w: (w.folder / "store").write_text(""), [], "store"),
    "not of this backend": (nothing, ["training.use_mca=false", "parallel.tensor=2"], "parallel.tensor: LLaMA-"),
    "unknown target": (
        nothing, ["training.finetuning_type=lora", "lora.target_modules=[q_prj]"], "lora.target_modules: no linear",
    ),
    "hybrid without a pattern": (nothing, ["checkpoint.kind=hybrid"], "checkpoint.pattern is missing"),
    "hybrid of another model": (
        nothing, ["checkpoint={kind: hybrid, pattern: M*-}"], "checkpoint.pattern='M*-' has 1 attention and MLP layers",
    ),
    "rank of 0": (nothing, ["training.finetuning_type=lora", "lora.r=0"], "lora.r: "),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(workspace: Workspace, case: str):
    prepare, overrides, message = BAD_INPUT[case]
    prepare(workspace)
    flags = [part for override in overrides for part in ("--set", override)]
    # `run` makes the same checks, in the same order, before its first stage.
    run = mcaflow(workspace.folder, "check", "recipe.yaml", *flags)
    assert run.returncode == 2, run.stderr
    assert message in run.stderr
    assert len(run.stderr.splitlines()) == 1


STORES = {
    "a name that is too long": "x" * 300,
    "a file": "recipe.yaml",
    "a folder of the kernel's": "/proc/store",
}


@pytest.mark.parametrize("case", STORES)
def test_a_store_that_cannot_be_is_one_line(workspace: Workspace, case: str):
    run = mcaflow(workspace.folder, "check", "recipe.yaml", "--store", STORES[case])
    assert run.returncode == 2
    assert len(run.stderr.splitlines()) == 1


def test_a_prefect_server_that_does_not_answer_is_named_before_anything_runs(workspace: Workspace):
    run = mcaflow(workspace.folder, "run", "recipe.yaml")
    assert run.returncode == 2
    assert "PREFECT_API_URL: no Prefect server answers at http://127.0.0.1:1/api" in run.stderr
    assert "unset the variable to run with a temporary one" in run.stderr
    assert list((workspace.folder / "store").glob("[a-z]*")) == []


def test_help_imports_no_more_than_it_needs(tmp_path: Path):
    run = mcaflow(tmp_path, "--help")
    assert run.returncode == 0
    assert {"run", "plan", "check", "ls", "show", "verify", "lineage"} <= set(run.stdout.split())


def test_commands_on_a_store_that_is_not_there_say_so(tmp_path: Path):
    run = mcaflow(tmp_path, "ls")
    assert run.returncode == 2
    assert "there is no artifact store" in run.stderr


def test_plan_shows_the_changed_field(run: Run, write_recipe: Callable):
    shown = mcaflow(run.folder, "plan", str(write_recipe(run.config)), "--set", "training.learning_rate=0.5")
    assert shown.returncode == 0, shown.stderr
    assert "training.learning_rate: 0.001 → 0.5" in shown.stdout
    recipe = str(write_recipe(run.config))
    anew = mcaflow(run.folder, "plan", recipe, "--from", "export", "--refresh", "dataset")
    assert {line.split()[0] for line in anew.stdout.splitlines() if "as asked for" in line} == {
        "dataset",
        "export",
        "evaluate",
    }
    wrong = mcaflow(run.folder, "plan", recipe, "--from", "export", "--until", "train")
    assert (wrong.returncode, "export: no such stage in this run" in wrong.stderr) == (2, True)


def test_show_lineage_and_ls_answer_from_the_store(run: Run):
    store = ["--store", run.config.store.path]
    export = run.result.outcomes["export"].artifact.key
    (line,) = [
        line for line in mcaflow(run.folder, "ls", *store).stdout.splitlines() if f"export/{export[:12]}" in line
    ]
    assert line.rstrip().endswith("  test"), "the name of the recipe that used it"
    shown = mcaflow(run.folder, "show", f"export/{export[:8]}", *store).stdout
    assert "model.safetensors" in shown
    assert "test (1 run)" in shown
    lineage = mcaflow(run.folder, "lineage", "export", *store).stdout
    for stage in ("train", "dataset", "convert", "download"):
        assert f"{stage}/" in lineage
    assert mcaflow(run.folder, "show", "0000000", *store).returncode == 2


def test_lineage_says_when_a_parent_was_replaced_since(run: Run):
    # As after a refresh that came to other content: another record under the same key.
    store = ArtifactStore(run.config.store.path)
    train = run.result.outcomes["train"].artifact
    changed = train.record.model_copy(update={"digest": "0" * 64, "parts": {}})
    path = store.location("train", train.key) / RECORD_NAME
    path.chmod(0o644)
    path.write_text(dumps(changed))
    shown = mcaflow(run.folder, "lineage", "export", "--store", run.config.store.path).stdout
    assert "replaced by a refresh since" in shown


def test_fields_lists_every_field_with_its_place_in_the_key(tmp_path: Path):
    shown = mcaflow(tmp_path, "fields").stdout
    assert "training.learning_rate" in shown
    assert "launcher.nproc_per_node" in shown
    (line,) = [line for line in shown.splitlines() if "training.lr_scheduler_type" in line]
    assert "constant | linear | cosine | warmup_stable_decay" in line, "into a pipe, no line is cut"
    listed = json.loads(mcaflow(tmp_path, "fields", "launcher", "--json").stdout)
    assert listed[0]["choices"] == ["local", "nodes", "slurm"]
    assert mcaflow(tmp_path, "fields", "trainin").returncode == 2


def test_evaluations_and_the_last_step_are_printed_however_quick_they_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(StageReporter, "_tell_prefect", lambda *_: None)
    output = io.StringIO()
    with run_console(Console(file=output)):
        reporter = StageReporter("train", logging.getLogger("test"))
        for step in range(1, 5):
            reporter.progress(step, 4, step=step, loss=1.0)
            if step == 2:
                reporter.progress(step, 4, step=step, eval_loss=2.0)
    shown = [line.split() for line in output.getvalue().splitlines()]
    assert shown == [["train", "started"], ["train", "2/4", "eval", "loss", "2"], ["train", "4/4", "loss", "1"]]


def test_verify_finds_a_flipped_bit_and_exits_with_1(run: Run):
    store = ["--store", run.config.store.path]
    assert mcaflow(run.folder, "verify", "--full", *store).returncode == 0
    path = Path(run.config.store.path) / "export" / run.result.outcomes["export"].artifact.key / "model.safetensors"
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = mcaflow(run.folder, "verify", *store)
    assert found.returncode == 1
    assert "model.safetensors" in found.stdout
