"""`plan` says what a run would do and names the field that makes the difference; it computes nothing."""

import json
import os
import shutil
from pathlib import Path

import pytest

from flows.graph import downstream, nodes_of, stages_from, waves
from flows.plan import PlanRow, make_plan
from flows.recipe import PipelineConfig
from tasks.report import LogReporter
from tasks.store import ArtifactStore
from tests.flows.finished import Run

STORED = ("dataset", "convert", "train", "export", "evaluate")
DAMAGE = {
    "flipped bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "truncated": lambda data: data[:-1],
    "deleted": lambda data: None,
}


def plan(config: PipelineConfig) -> dict[str, PlanRow]:
    return {row.stage: row for row in make_plan(config, config.store.open())}


def verdicts(config: PipelineConfig) -> dict[str, str]:
    return {name: row.verdict for name, row in plan(config).items()}


def test_everything_is_a_hit_after_a_run(run: Run):
    assert set(verdicts(run.config).values()) == {"hit"}


def test_a_changed_learning_rate_is_named_and_touches_training_alone(run: Run):
    rows = plan(run.with_fields(training={"learning_rate": 2e-3}))
    (change,) = rows["train"].changed
    assert (change.field, change.old, change.new) == ("training.learning_rate", 1e-3, 2e-3)
    assert {name: row.verdict for name, row in rows.items()} == {
        "download": "hit", "dataset": "hit", "convert": "hit", "train": "miss", "export": "waits", "evaluate": "waits",
    }  # fmt: skip


def test_fields_of_the_data_set_are_named_as_in_the_recipe(run: Run):
    """Its objective stands in another section, and an empty column map is no field of its own."""
    fields = {"formatting": "text", "columns": {"prompt": "output"}, "template": None}
    row = plan(run.with_fields(training={"stage": "pt"}, dataset=fields))["dataset"]
    assert {change.field for change in row.changed} == {
        "training.stage", "dataset.formatting", "dataset.columns.prompt", "dataset.template",
    }  # fmt: skip


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"tensor": 2}},
        {"parallel": {"pipeline": 2}, "training": {"micro_batch_size": 2}},
        {"launcher": {"nproc_per_node": 1}},
        {"training": {"save_steps": 0, "logging_steps": 3}, "dataset": {"num_workers": 2}, "eval": {"batch_size": 1}},
    ],
)
def test_where_and_how_it_runs_invalidates_nothing(run: Run, sections: dict):
    assert set(verdicts(run.with_fields(**sections)).values()) == {"hit"}


def test_a_changed_row_invalidates_the_data_set_but_not_the_conversion(run: Run):
    path = Path(run.config.dataset.files[0])
    rows = json.loads(path.read_text())
    rows[0]["output"] += " indeed"
    path.write_text(json.dumps(rows))
    found = plan(run.config)
    assert found["dataset"].verdict == "miss"
    assert path.name in str(found["dataset"].changed)
    assert found["convert"].verdict == "hit"
    assert [found[name].verdict for name in downstream(run.config, "dataset")] == ["waits"] * 3


def test_touched_files_are_hits(run: Run):
    for path in [Path(run.config.dataset.files[0]), *Path(run.config.model.name_or_path).iterdir()]:
        os.utime(path, (1, 1))
    assert set(verdicts(run.config).values()) == {"hit"}


def test_what_is_to_be_computed_anew_is_no_hit_and_what_is_not_needed_is_left_out(run: Run):
    again = stages_from(run.config, "train")
    rows = make_plan(run.config, run.config.store.open(), again, "export")
    assert {row.stage: row.verdict for row in rows} == {
        "download": "hit", "dataset": "hit", "convert": "hit", "train": "miss", "export": "miss",
    }  # fmt: skip
    assert again == ("train", "export", "evaluate")


def test_what_the_remote_store_has_is_said(run: Run, tmp_path: Path):
    config = run.with_fields(store={"remote": f"file://{tmp_path}/shared"})
    (convert,) = config.store.open().ls("convert")
    config.store.open().remote.push(convert, LogReporter("convert"))
    for stage in ("convert", "dataset"):
        shutil.rmtree(Path(config.store.path) / stage)
    rows = plan(config)
    assert (rows["convert"].detail, rows["convert"].remote) == ("in the remote store", True)
    assert (rows["dataset"].detail, rows["dataset"].remote) == ("never computed", False)


def test_moved_inputs_are_hits(run: Run):
    moved = run.folder / "elsewhere"
    (run.folder / "assets").rename(moved)
    config = run.with_fields(
        model={"name_or_path": str(moved / "model")}, dataset={"files": [str(moved / "data.json")]}
    )
    assert set(verdicts(config).values()) == {"hit"}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("stage", STORED)
def test_damage_is_named_and_touches_its_stage_alone(run: Run, stage: str, damage: str):
    store = ArtifactStore(run.config.store.path)
    (artifact,) = store.ls(stage)
    name = max(artifact.record.files, key=lambda file: artifact.record.files[file].size)
    path = artifact.path / name
    os.chmod(path, 0o644)
    content = DAMAGE[damage](path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)

    found = plan(run.config)
    assert found[stage].verdict == "miss"
    assert name in found[stage].detail
    waiting = set(downstream(run.config, stage))
    assert {row.verdict for other, row in found.items() if other not in waiting | {stage}} == {"hit"}


def test_a_plan_changes_nothing(run: Run):
    store = Path(run.config.store.path)
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*") if ".statcache" not in path.parts}
    plan(run.with_fields(training={"learning_rate": 2e-3}))
    after = {path: path.stat().st_mtime_ns for path in store.rglob("*") if ".statcache" not in path.parts}
    assert after == before


def test_an_empty_store_says_that_nothing_was_computed(run: Run, tmp_path: Path):
    rows = plan(run.with_fields(store={"path": str(tmp_path / "empty")}))
    assert rows["download"].detail == "never computed"
    assert {rows[name].verdict for name in STORED} == {"waits"}


@pytest.mark.parametrize(("kind", "start"), [("gpt", "convert"), ("hybrid", "translate")])
def test_every_node_comes_after_what_it_waits_for(kind: str, start: str):
    checkpoint = {"kind": kind} | ({"pattern": "M*-"} if kind == "hybrid" else {})
    recipe = {"model": {"name_or_path": "m"}, "dataset": {"files": ["f"], "template": "qwen"}, "checkpoint": checkpoint}
    nodes = nodes_of(PipelineConfig.model_validate(recipe))
    assert list(nodes) == ["download", "dataset", start, "train", "export", "evaluate"]
    seen: set[str] = set()
    for name, node in nodes.items():
        assert (name, set(node.after) <= seen) == (node.name, True)
        seen.add(name)
    assert list(waves(nodes)) == [("download",), ("dataset", start), ("train",), ("export",), ("evaluate",)]
    assert downstream(PipelineConfig.model_validate(recipe), start) == ("train", "export", "evaluate")
