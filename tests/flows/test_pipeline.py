"""The flow on a real Prefect server: stages come from the store, on a rerun, on a retry and after damage."""

import os
import re
import shutil
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter, FlowRunFilterId
from prefect.flow_engine import run_flow
from prefect.states import Pending, State

from flows.graph import nodes_of
from flows.pipeline import PipelineResult, pipeline
from flows.preflight import check_pending
from flows.report import compared, evaluation_metrics
from flows.run_page import report_path
from mca_lib.errors import ConfigError, DataError
from mca_lib.evaluation.report import comparison
from tasks.aliases import Aliases
from tasks.ledger import entries, users
from tasks.store import ArtifactStore
from tests.flows.finished import Run

pytestmark = pytest.mark.usefixtures("forked_jobs")


def task_states(state: State) -> dict[str, str]:
    """Names of the final states of the flow run's tasks; with a retry, of its last attempt."""
    with get_client(sync_client=True) as client:
        run_filter = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
        tasks = client.read_task_runs(flow_run_filter=run_filter, limit=100)
    latest = sorted(tasks, key=lambda task: task.flow_run_run_count)
    return {re.split("[ -]", task.name)[0]: task.state.name for task in latest}


def computed(result: PipelineResult) -> set[str]:
    return {name for name, outcome in result.outcomes.items() if not outcome.cached}


def test_a_first_run_computes_every_stage(finished: Run):
    assert computed(finished.result) == set(nodes_of(finished.config))


def test_the_exported_model_is_one_that_transformers_loads(finished: Run):
    exported = finished.result.outcomes["export"].artifact.path
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in exported.iterdir()
    }
    # Evaluation loaded it with transformers and refuses missing weights.
    heading, loss, *_ = comparison(evaluation_metrics(finished.result.outcomes["evaluate"].artifact))
    assert heading == ["measure", "base", "trained", "change"]
    assert float(loss[2]) < float(loss[1])
    samples = finished.result.outcomes["evaluate"].artifact.path / "samples.jsonl"
    assert len(samples.read_text().splitlines()) == 1


def test_a_second_run_is_cached_and_prefect_says_so(run: Run):
    """It trains nothing, so it needs no launcher either."""
    state = pipeline(run.with_fields(launcher={"interface": "no-such-interface"}), return_state=True)
    assert computed(state.result()) == set()
    assert task_states(state) == dict.fromkeys(nodes_of(run.config), "Cached")
    with pytest.raises(ConfigError, match=r"launcher\.interface"):
        check_pending(run.with_fields(launcher={"interface": "no-such-interface"}), ["train"])


def test_a_run_leaves_its_evaluation_and_its_stages_in_prefect(run: Run):
    state = pipeline(run.config, return_state=True)
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id={"any_": [state.state_details.flow_run_id]})
        )
    pages = {artifact.key: artifact.data for artifact in found}
    assert set(pages) == {"evaluation", "run"}
    page = report_path(run.config.store.open(), state.result().outcomes["evaluate"].artifact)
    assert f"Report: `{page}`" in pages["run"]
    assert "![loss](data:image/svg+xml;base64," in pages["run"]
    assert "s of computation spared" in page.read_text()


def test_a_damaged_conversion_is_computed_again_and_training_is_not(run: Run):
    store = ArtifactStore(run.config.store.path)
    (artifact,) = store.ls("convert")
    path = max(artifact.path.rglob("*.distcp"), key=lambda file: file.stat().st_size)
    os.chmod(path, 0o644)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))
    result = pipeline(run.config)
    assert computed(result) == {"convert"}
    assert list((store.root / ".quarantine").glob("convert-*"))


def test_a_refreshed_stage_is_computed_and_equal_content_spares_the_rest(run: Run):
    assert computed(pipeline(run.config, refresh=["dataset"])) == {"dataset"}


def test_a_run_until_a_stage_computes_what_that_needs_and_nothing_else(run: Run):
    shutil.rmtree(Path(run.config.store.path) / "convert")
    state = pipeline(run.config, refresh=["dataset"], until="dataset", return_state=True)
    assert computed(state.result()) == {"dataset"}
    assert task_states(state) == {"download": "Cached", "dataset": "Completed"}
    with pytest.raises(ConfigError, match="export: no such stage in this run; it has download, dataset"):
        pipeline(run.config, refresh=["export"], until="dataset")


def test_the_ledger_says_what_a_run_used_and_how_it_ended(run: Run):
    store = run.config.store.open()
    pipeline(run.config)
    pipeline(run.with_fields(dataset={"template": "qwen"}), until="dataset")
    with pytest.raises(ConfigError):
        pipeline(run.with_fields(dataset={"cutoff_len": 2**20}))
    (second, alive), (first, _), (finished, _) = entries(store)
    assert [(entry.name, entry.state, alive) for entry in (second, first, finished)] == [
        ("test", "completed", False)
    ] * 3
    assert {use.stage: use.cached for use in first.uses} == dict.fromkeys(nodes_of(run.config), True)
    assert [(use.stage, use.cached) for use in second.uses] == [("download", True), ("dataset", False)]
    assert not any(use.cached for use in finished.uses)
    (export,) = store.ls("export")
    assert [entry.id for entry in users(store)["export", export.key]] == [first.id, finished.id]


def test_a_retry_does_not_repeat_what_was_computed_anew(run: Run):
    """As after a failure behind a stage that was to be computed anew: Retry goes on behind it."""
    state = pipeline(run.config, refresh=["dataset"], until="dataset", return_state=True)
    assert retried(state, {"config": run.config, "refresh": ["dataset"], "until": "dataset"}) == set()


def retried(state: State, parameters: dict) -> set[str]:
    """What the button Retry of the UI computes: the same flow run, from the top."""
    with get_client(sync_client=True) as client:
        run_id = state.state_details.flow_run_id
        client.set_flow_run_state(run_id, Pending(), force=True)
        flow_run = client.read_flow_run(run_id)
    return computed(run_flow(pipeline, flow_run=flow_run, parameters=parameters))


def test_a_retry_takes_finished_stages_from_the_store(run: Run):
    folder = Path(run.config.store.path) / "export"
    shutil.rmtree(folder)
    folder.write_text("in the way")
    failed = pipeline(run.config, return_state=True)
    assert failed.is_failed()
    assert "export" not in {name for name, state in task_states(failed).items() if state == "Completed"}
    folder.unlink()
    assert retried(failed, {"config": run.config}) == {"export"}


def test_the_result_is_promoted_where_the_gate_lets_it(run: Run):
    """Twice the same model is promoted once; another one is compared with it on this run's rows."""
    first = pipeline(run.with_fields(promote={"model": "chat", "gate": ["heldout_loss < base"]}), return_state=True)
    assert task_states(first)["promote"] == "Promoted"
    gate = ["heldout_loss < production - 0.5", "accuracy >= 0"]
    changed = run.with_fields(promote={"model": "chat", "gate": gate}, export={"dtype": "bfloat16"})
    second = pipeline(changed, return_state=True)
    assert (second.is_completed(), task_states(second)["promote"]) == (True, "NotPromoted")
    verdict = second.result().verdict
    assert verdict.message.startswith(f"chat/production not promoted: {gate[0]}: heldout_loss is ")
    holder = first.result().outcomes["export"].artifact
    names = Aliases(run.config.store.open())
    assert [(held.key, held.run) for held in names.history("chat")] == [(holder.key, "test")]
    heading, loss, *_ = comparison(compared(second.result().outcomes["evaluate"].artifact, verdict))
    assert heading == ["measure", "base", "production", "trained", "change"]
    assert float(loss[2]) == pytest.approx(names.current("chat").metrics["heldout_loss"], abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dataset": {"template": "chatmll"}}, ConfigError, "did you mean 'chatml'"),
        ({"dataset": {"cutoff_len": 2**20}}, ConfigError, "dataset.cutoff_len"),
        ({"dataset": {"files": ["nowhere.json"]}}, (ConfigError, DataError), "nowhere.json"),
        ({"parallel": {"tensor": 16}, "launcher": {"nproc_per_node": 16}, "training": {"global_batch_size": 16}},
         ConfigError, "attention heads"),
    ],
)  # fmt: skip
def test_a_recipe_that_cannot_run_fails_before_any_stage(run: Run, changes: dict, error: type[Exception], message: str):
    state = pipeline(run.with_fields(**changes), return_state=True)
    with pytest.raises(error, match=message):
        state.result()
    assert task_states(state) == {}


def test_parameters_from_the_ui_are_checked_by_the_recipe(run: Run):
    content = run.config.model_dump(mode="json")
    content["training"]["learning_rat"] = 1
    state = pipeline(content, return_state=True)
    assert state.is_failed()
    assert "learning_rat" in state.message
