"""The evaluate stage on a real store, with real models and the real job."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from mca_lib.data.token_store import TokenStoreWriter
from mca_lib.errors import ConfigError
from mca_lib.tiny_models import make_tiny_model, make_tokenizer
from tasks.canonical import JSON
from tasks.contract import Produced, Stage, StageContext
from tasks.download import DownloadStage, ModelConfig
from tasks.evaluate import EvalConfig, EvaluateStage
from tasks.stage import Hit, Miss, ensure, probe
from tasks.store import Artifact, ArtifactStore
from tests.mca_lib.evaluation.tiny_tasks import ROWS, write_tasks

pytestmark = pytest.mark.usefixtures("forked_jobs")
QUESTION, ANSWER = "Count from one to three.", "One, two, three."


@dataclass(frozen=True)
class Tokens(Stage):
    """In place of the dataset stage: one training and `held_out` eval documents."""

    train_text: str = "Hello."
    held_out: int = 2
    name: ClassVar[str] = "dataset"
    version: ClassVar[int] = 1

    def identity(self) -> dict[str, JSON]:
        return {"train_text": self.train_text, "held_out": self.held_out}

    def produce(self, ctx: StageContext) -> Produced:
        tokenizer = make_tokenizer()
        chat = [{"role": "user", "content": QUESTION}]
        prompt = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)).input_ids
        answer = tokenizer(ANSWER + "<|im_end|>").input_ids
        document = (prompt + answer, [False] * len(prompt) + [True] * len(answer))
        text = tokenizer(self.train_text).input_ids
        splits = {"train": [(text, [True] * len(text))], "eval": [document] * self.held_out}
        for split, documents in splits.items():
            if documents:
                with TokenStoreWriter(ctx.staging / split) as writer:
                    for each in documents:
                        writer.add_row([each])
        (ctx.staging / "meta.json").write_text(json.dumps({"stop_token_ids": [2]}))
        return Produced(parts={"eval": f"{self.held_out} documents"} if self.held_out else {})


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> ArtifactStore:
    return ArtifactStore(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def models(store, tmp_path_factory) -> list[Artifact]:
    folder = tmp_path_factory.mktemp("models")
    for seed in range(3):
        make_tiny_model(folder / str(seed), seed=seed, num_hidden_layers=1)
    return [_artifact(store, DownloadStage(ModelConfig(name_or_path=str(folder / str(seed))))) for seed in range(3)]


def _artifact(store: ArtifactStore, stage: Stage) -> Artifact:
    return ensure(store, stage).artifact


@pytest.fixture(scope="module")
def stage(store, models) -> EvaluateStage:
    config = EvalConfig(num_samples=1, max_new_tokens=4)
    return EvaluateStage(base=models[0], trained=models[1], dataset=_artifact(store, Tokens()), config=config)


@pytest.fixture(scope="module")
def evaluated(store, stage) -> Artifact:
    return _artifact(store, stage)


def test_artifact_holds_figures_samples_and_report(evaluated):
    metrics = json.loads((evaluated.path / "metrics.json").read_text())
    assert metrics == evaluated.stats
    assert metrics["documents"] == 2
    assert set(metrics["models"]) == {"base", "trained"}
    (sample,) = (json.loads(line) for line in (evaluated.path / "samples.jsonl").read_text().splitlines())
    assert QUESTION in sample["prompt"]
    assert sample["reference"] == ANSWER
    assert "| held-out loss |" in (evaluated.path / "report.md").read_text()


def test_the_html_report_has_figures_data_and_lineage_and_is_always_the_same(store, stage, evaluated):
    text = (evaluated.path / "report.html").read_text()
    assert f"{evaluated.stats['models']['trained']['loss']:.4f}" in text
    assert QUESTION in text
    for artifact in (stage.base, stage.trained, stage.dataset):
        assert artifact.key in text
        assert str(artifact.path) not in text, "where things lie is no part of an evaluation"
    again = ensure(store, stage, refresh=True).artifact
    assert again.record.files == evaluated.record.files


def test_second_run_is_served_from_the_store(store, stage, evaluated):
    assert ensure(store, stage).cached


def test_batch_size_is_execution(store, stage, evaluated):
    assert isinstance(probe(store, replace(stage, config=stage.config.model_copy(update={"batch_size": 9}))), Hit)


def test_without_tasks_the_key_says_nothing_of_them(stage):
    """Evaluations of a release that knew no tasks are served."""
    fields = {"max_rows": None, "dtype": "float32", "prompts": [], "num_samples": 1, "max_new_tokens": 4}
    assert stage.identity() == fields


def test_other_settings_are_identity(store, stage, evaluated):
    missed = probe(store, replace(stage, config=stage.config.model_copy(update={"max_new_tokens": 5})))
    assert isinstance(missed, Miss)
    assert [change.field for change in missed.changed] == ["identity.max_new_tokens"]


def test_new_training_rows_do_not_invalidate_it(store, stage, evaluated):
    """What they change arrives through the trained model; the held-out rows are the same."""
    assert isinstance(probe(store, replace(stage, dataset=_artifact(store, Tokens(train_text="Bye.")))), Hit)


@pytest.mark.parametrize("role", ["base", "trained"])
def test_another_model_invalidates_it(store, stage, evaluated, models, role):
    missed = probe(store, replace(stage, **{role: models[2]}))
    assert isinstance(missed, Miss)
    assert [change.field for change in missed.changed] == [f"inputs.{role}"]


def test_without_held_out_rows_the_artifact_says_so(store, stage):
    unmeasured = replace(stage, dataset=_artifact(store, Tokens(held_out=0)))
    artifact = _artifact(store, unmeasured)
    assert artifact.stats["note"] == "no held-out rows"
    assert "No held-out rows" in (Path(artifact.path) / "report.md").read_text()


@pytest.fixture(scope="module")
def with_tasks(stage, tmp_path_factory) -> EvaluateStage:
    folder = write_tasks(tmp_path_factory.mktemp("tasks") / "tasks")
    changed = {"tasks": ["choices"], "task_path": str(folder), "num_samples": 0, "batch_size": "auto"}
    return replace(stage, config=stage.config.model_copy(update=changed))


def test_tasks_are_in_figures_report_and_stats(store, with_tasks):
    artifact = _artifact(store, with_tasks)
    measured = json.loads((artifact.path / "metrics.json").read_text())["tasks"]
    assert measured == artifact.stats["tasks"]
    assert list(measured) == ["choices.acc", "choices.acc_norm"]
    assert measured["choices.acc"]["base"]["documents"] == measured["choices.acc"]["trained"]["documents"] == len(ROWS)
    row = next(line for line in (artifact.path / "report.md").read_text().splitlines() if "| choices.acc |" in line)
    assert row.count("±") == 2
    assert isinstance(probe(store, with_tasks), Hit)


def test_the_content_of_task_files_is_identity_and_where_they_lie_is_not(store, with_tasks, tmp_path):
    _artifact(store, with_tasks)
    folder = tmp_path / "moved"
    shutil.copytree(with_tasks.config.task_path, folder)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "utils.pyc").write_text("")
    moved = replace(with_tasks, config=with_tasks.config.model_copy(update={"task_path": str(folder)}))
    assert isinstance(probe(store, moved), Hit)
    rows = folder / "data" / "rows.jsonl"
    rows.write_text(rows.read_text().replace("ten", "six"))
    missed = probe(store, moved)
    assert isinstance(missed, Miss)
    assert [change.field for change in missed.changed] == ["identity.task_files.data/rows.jsonl"]


def test_what_cannot_be_run_is_said_before_it_is(store, with_tasks):
    unknown = replace(with_tasks, config=with_tasks.config.model_copy(update={"tasks": ["absent"]}))
    with pytest.raises(ConfigError, match=r"^eval\.tasks: 'absent' is no task"):
        probe(store, unknown)
