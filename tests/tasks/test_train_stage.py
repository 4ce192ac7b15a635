"""The train stage with torchrun: what is published, what is cached, and what is left when it is killed."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from mca_lib.checkpoint.sealed import RECORD_NAME, new_staging, seal
from mca_lib.errors import CheckpointError, ConfigError
from tasks.canonical import JSON
from tasks.contract import Produced, Stage, StageContext
from tasks.errors import StageFailed
from tasks.links import link
from tasks.stage import Hit, Miss, ensure, probe
from tasks.store import ArtifactStore
from tasks.train import TrainStage
from tasks.training_config import DpoConfig, LauncherConfig, LoraConfig, ParallelConfig, TrainingConfig
from tests.mca_lib.trainers.training import make_model, make_store
from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("forked_jobs")

TRAINING = TrainingConfig(
    global_batch_size=4,
    num_train_epochs=2,
    learning_rate=5e-3,
    precision="fp32",
    save_steps=2,
    save_keep_every=8,
    seed=3,
    report_to=["tensorboard"],
)
DPO = TRAINING.model_copy(update={"stage": "dpo"})
LORA = TRAINING.model_copy(update={"finetuning_type": "lora"})
TWO_RANKS = LauncherConfig(nproc_per_node=2)


@dataclass(frozen=True)
class Given(Stage):
    """In place of the convert or dataset stage: a folder that exists already."""

    name: ClassVar[str] = "given"
    version: ClassVar[int] = 1

    folder: Path

    def identity(self) -> dict[str, JSON]:
        return {"name": self.folder.name}

    def produce(self, ctx: StageContext) -> Produced:
        subprocess.run(["cp", "-r", f"{self.folder}/.", ctx.staging], check=True)
        return Produced(parts={"train": self.folder.name, "eval": f"{self.folder.name} eval"})


def make_checkpoint(hf: Path, target: Path, poison: bool) -> None:
    """An MCA checkpoint directory; `poison` puts a NaN into its weights."""
    import torch

    from mca_lib.models import AutoModel
    from mca_lib.parallel import DistributingParallelArguments, initialize_model_parallel

    initialize_model_parallel(DistributingParallelArguments())
    models = AutoModel.from_pretrained(hf, None)
    if poison:
        with torch.no_grad():
            next(models.parameters()).fill_(float("nan"))
    models.save_pretrained(target)


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    ranks(1, make_model, folder / "hf")
    ranks(1, make_checkpoint, folder / "hf", folder / "checkpoint", False)
    ranks(1, make_checkpoint, folder / "hf", folder / "poisoned", True)
    make_store(folder / "rows", rows=18)
    return folder


def stage(store: ArtifactStore, folder: Path, checkpoint: str = "checkpoint", rows: str = "rows") -> TrainStage:
    given = [ensure(store, Given(folder / name)).artifact for name in (checkpoint, rows)]
    return TrainStage(*given, TRAINING, ParallelConfig(tensor=2), TWO_RANKS, LoraConfig(), DpoConfig())


@pytest.fixture(scope="module")
def store(folder) -> ArtifactStore:
    return ArtifactStore(folder / "store")


@pytest.fixture(scope="module")
def trained(store, folder):
    return ensure(store, stage(store, folder))


def test_the_artifact_is_a_checkpoint_with_the_figures_of_the_run(store, trained):
    artifact = trained.artifact
    assert not trained.cached
    assert {"mca_config.json", "model"} <= {path.name for path in artifact.path.iterdir()}
    assert {"weights", "config"} <= set(artifact.parts)
    stats = artifact.record.stats
    assert (stats["steps"], stats["world_size"], len(stats["peak_memory_mb"])) == (10, 2, 2)
    assert stats["train_loss"] > stats["final_loss"]
    assert stats["preflight"]["seconds"] > 0
    events = store.root / ".runs" / f"train-{artifact.record.key}"
    assert len(list(events.glob("events.*"))) == 1, "they outlive the work folder"
    lines = [json.loads(line) for line in (events / "training_log.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 10
    assert (events / "logs" / "train.log").is_file()
    assert [path.name for path in events.glob("checkpoint-*")] == ["checkpoint-8"]


def test_layout_and_cadence_are_not_part_of_the_key_and_the_learning_rate_is(store, folder, trained):
    same = replace(
        stage(store, folder),
        parallel=ParallelConfig(pipeline=2),
        launcher=LauncherConfig(nproc_per_node=4),
        training=TRAINING.model_copy(update={"save_steps": 7, "micro_batch_size": 2}),
        lora=LoraConfig(r=99),
        dpo=DpoConfig(pref_beta=0.7),
    )
    assert isinstance(probe(store, same), Hit)
    other = probe(store, replace(same, training=TRAINING.model_copy(update={"learning_rate": 1e-4})))
    assert isinstance(other, Miss)
    assert [change.field for change in other.changed] == ["identity.learning_rate"]


def test_ranks_are_told_the_digests_of_what_they_read(store, folder, tmp_path):
    trained = stage(store, folder)
    told = trained._arguments(tmp_path, tmp_path / "final")
    names = ("weights_digest", "train_digest", "eval_digest")
    assert [told[name] for name in names] == [trained.checkpoint.parts.get("weights"), "rows", "rows eval"]


def test_what_decides_the_best_model_is_part_of_the_key_where_it_is_the_result(store, folder):
    last = stage(store, folder)
    assert last.inputs().keys() == {"checkpoint", "dataset"}
    assert "eval_steps" not in last.identity()
    best = replace(last, training=TRAINING.model_copy(update={"load_best_model_at_end": True, "eval_steps": 5}))
    assert best.inputs()["held out"].digest == last.dataset.parts["eval"]
    assert best.identity()["eval_steps"] == 5
    assert best.space_needed() > last.space_needed()


def test_fields_without_effect_are_not_part_of_the_key(store, folder):
    last = replace(stage(store, folder), training=TRAINING.model_copy(update={"max_steps": 20}))
    idle = {"num_train_epochs": 3.0, "decay_ratio": 0.5, "decay_style": "cosine", "mtp_loss_weight": 0.3}
    assert replace(last, training=last.training.model_copy(update=idle)).identity() == last.identity()
    stable = TRAINING.model_copy(update={"lr_scheduler_type": "warmup_stable_decay", "max_steps": -1})
    identity = replace(last, training=stable).identity()
    for field in ("num_train_epochs", "decay_ratio", "decay_style"):
        assert replace(last, training=stable.model_copy(update={field: idle[field]})).identity() != identity


def test_the_preference_loss_is_part_of_the_key_of_a_preference_training_only(store, folder):
    dpo = replace(stage(store, folder), training=DPO)
    assert dpo.identity()["dpo"] == {
        "pref_loss": "sigmoid",
        "pref_beta": 0.1,
        "label_smoothing": 0.0,
        "simpo_gamma": 0.5,
        "pref_ftx": 0.0,
    }
    assert replace(dpo, dpo=DpoConfig(use_ref_model=True)).identity() == dpo.identity()
    assert replace(dpo, dpo=DpoConfig(pref_beta=0.2)).identity() != dpo.identity()
    assert "dpo" not in stage(store, folder).identity()


def test_ranks_get_the_fields_of_the_preference_loss(store, folder, tmp_path):
    made = replace(stage(store, folder), training=DPO, dpo=DpoConfig(pref_loss="hinge", pref_beta=0.2))
    arguments = made._arguments(tmp_path, tmp_path / "final")
    assert (arguments["stage"], arguments["pref_loss"], arguments["pref_beta"]) == ("dpo", "hinge", 0.2)


def test_two_machines_train_to_the_same_bits_as_one(folder, trained):
    """The second machine is an agent on loopback, started as a user would."""
    endpoint = f"127.0.0.1:{free_port()}"
    agent = subprocess.Popen([sys.executable, "-m", "flows.cli", "agent", endpoint])
    store = ArtifactStore(folder / "machines")
    two = LauncherConfig(kind="nodes", nnodes=2, rdzv_endpoint=endpoint, interface="lo")
    try:
        artifact = ensure(store, replace(stage(store, folder), launcher=two)).artifact
        assert agent.wait(60) == 0
    finally:
        agent.kill()
        agent.wait()
    assert (artifact.stats["world_size"], artifact.digest) == (2, trained.artifact.digest)


def test_stopped_while_it_takes_the_checkpoint_over_it_publishes_the_whole_one_next_time(folder, trained, monkeypatch):
    store = ArtifactStore(folder / "halfway")
    half = stage(store, folder)
    final = store.work("train", trained.artifact.key) / "final"
    staging = new_staging(final.parent)
    ignore = shutil.ignore_patterns(".artifact.json")
    shutil.copytree(trained.artifact.path, staging, ignore=ignore, dirs_exist_ok=True)
    seal(staging, final, {})
    (final.parent / "train_result.json").write_text(json.dumps(trained.artifact.stats))
    once = iter([link])
    with monkeypatch.context() as patch:
        patch.setattr("tasks.links.link", lambda source, target: next(once)(source, target))
        with pytest.raises(StopIteration):
            ensure(store, half)
    again = ensure(store, half).artifact
    assert (again.digest, again.record.files.keys()) == (trained.artifact.digest, trained.artifact.record.files.keys())


def cut(work: Path) -> None:
    (work / "final" / "adapter_model.safetensors").write_bytes(b"adapter")


@pytest.mark.parametrize(
    ("damage", "launches"),
    [
        (lambda work: None, 1),
        (cut, 2),
        (lambda work: (work / "final" / RECORD_NAME).unlink(), 2),
        (lambda work: (work / "train_result.json").write_text(""), 2),
        (lambda work: (work / "train_result.json").write_text("[]"), 2),
    ],
    ids=["whole", "weights", "record", "empty result", "other result"],
)
def test_what_an_attempt_left_is_published_when_it_is_whole(folder, tmp_path, monkeypatch, damage, launches):
    store, works = ArtifactStore(tmp_path), []

    def train(ctx: StageContext, *_, **__) -> None:
        works.append(ctx.work)
        staging = new_staging(ctx.work)
        (staging / "adapter_model.safetensors").write_bytes(b"whole adapter")
        seal(staging, ctx.work / "final", {})
        (ctx.work / "train_result.json").write_text('{"steps": 20}')

    monkeypatch.setattr("tasks.train.launch", train)
    lora = replace(stage(store, folder), training=LORA)
    with monkeypatch.context() as patch:
        patch.setattr("tasks.train.link_tree", lambda *_: next(iter(())))
        with pytest.raises(StopIteration):
            ensure(store, lora)
    damage(works[0])
    artifact = ensure(store, lora).artifact
    assert len(works) == launches
    assert (artifact.path / "adapter_model.safetensors").read_bytes() == b"whole adapter"
    assert artifact.record.files.keys() == {"adapter_model.safetensors"}
    assert artifact.stats["steps"] == 20


def test_a_defect_in_a_rank_comes_with_that_ranks_traceback(store, folder):
    make_store(folder / "inconsistent", rows=4)
    documents = folder / "inconsistent" / "train" / "row_documents.npy"
    np.save(documents, np.load(documents) + 1000)
    alone = {"launcher": LauncherConfig(), "parallel": ParallelConfig()}
    with pytest.raises(StageFailed, match=r"(?s)train: rank 0: IndexError: .*log: .*row_checks\.py"):
        ensure(store, replace(stage(store, folder, rows="inconsistent"), **alone))


def test_a_mistake_that_a_rank_finds_is_one_line(store, folder):
    with pytest.raises(CheckpointError, match=r"holds NaN") as caught:
        ensure(
            store,
            replace(stage(store, folder, checkpoint="poisoned"), launcher=LauncherConfig(), parallel=ParallelConfig()),
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"training": DPO, "dpo": DpoConfig(use_ref_model=False)}, "dpo.use_ref_model: .* sigmoid needs a reference"),
        (
            {"training": DPO, "dpo": DpoConfig(pref_loss="ipo", label_smoothing=0.1)},
            "dpo.label_smoothing: .*use sigmoid",
        ),
        ({"training": LORA, "lora": LoraConfig(target_modules=["q_prj"])}, r"lora.target_modules: .*'q_proj'\?"),
        ({"training": TRAINING.model_copy(update={"use_mca": False, "freeze": ["norm"]})}, "training.freeze: LLaMA-"),
        ({"launcher": LauncherConfig(nproc_per_node=3)}, r"launcher.nproc_per_node: 3 ranks .* = 2"),
        (
            {"launcher": LauncherConfig(nproc_per_node=6)},
            r"training.global_batch_size: 4 .*training.micro_batch_size .* = 1 × 3 = 3",
        ),
        ({"parallel": ParallelConfig(tensor=8), "launcher": LauncherConfig(nproc_per_node=8)}, r"parallel.tensor=8"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(store, folder, changes, named):
    # Another seed, so that the artifact of the first test does not answer.
    stage_ = replace(stage(store, folder), **changes)
    stage_ = replace(stage_, training=stage_.training.model_copy(update={"seed": 99}))
    with pytest.raises(ConfigError, match=named):
        ensure(store, stage_)
