"""A preference training that was killed goes on with the same reference, and ends with the same bits."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.mca_lib.trainers.preference_training import history, make_pair_store, make_trainer, train
from tests.mca_lib.trainers.test_resume import change_tokens, change_weights, damage, same_weights
from tests.mca_lib.trainers.training import kill_in_step, make_model
from tests.ranks import RankError

OPTIONS = {"num_train_epochs": 2, "save_steps": 2, "save_total_limit": 2}  # 10 steps
PREFERENCE: dict[str, Any] = {}

LAYOUTS = {
    "DP2 bf16": (2, {"bf16": True}),
    "CP2": (2, {"context_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dpo resume")
    ranks(1, make_model, folder / "model")
    make_pair_store(folder / "store", rows=18)
    make_pair_store(folder / "store", rows=5, split="eval", seed=9)
    return folder


def train_until(model: str, store: str, out: str, options: dict[str, Any], step: int) -> None:
    kill_in_step(step, signal.SIGKILL)
    train(model, store, out, options, PREFERENCE)


def train_changed(model: str, store: str, out: str, options: dict[str, Any]) -> None:
    """With weights that are changed after they were loaded."""
    import torch

    trainer = make_trainer(model, store, out, options, PREFERENCE)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(2)
    trainer.train()


def interrupted(ranks, folder: Path, name: str, world_size: int, options: dict[str, Any], step: int) -> Path:
    with pytest.raises(RankError, match="exit -9"):
        ranks(world_size, train_until, f"{folder}/model", f"{folder}/store", str(folder / name), options, step)
    assert not (folder / name / "final").exists()
    return folder / name


def reference(out: Path) -> dict[str, tuple[int, np.ndarray]]:
    """Split → when its file was written, and what is in it."""
    return {p.stem: (p.stat().st_mtime_ns, np.load(p)) for p in sorted((out / "reference").glob("*.npy"))}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_and_resumed_equals_uninterrupted_bitwise(ranks, folder, layout):
    world_size, extra = LAYOUTS[layout]
    options, places = {**OPTIONS, **extra}, (f"{folder}/model", f"{folder}/store")
    whole = folder / f"whole {layout}"
    uninterrupted = ranks(world_size, train, *places, str(whole), options, PREFERENCE)
    broken = interrupted(ranks, folder, f"broken {layout}", world_size, options, 6)
    before = reference(broken)
    resumed = ranks(world_size, train, *places, str(broken), options, PREFERENCE)
    assert ranks(1, same_weights, whole / "final", broken / "final") == [True]
    assert (history(resumed) == history(uninterrupted)).all()
    for name in ("eval_loss", "eval_measures", "train_loss", "trained_tokens"):
        assert resumed[0]["result"][name] == uninterrupted[0]["result"][name], name
    for split, (written, values) in reference(broken).items():
        assert written == before[split][0], "read, not computed again"
        assert (values == reference(whole)[split][1]).all()


def test_a_damaged_reference_is_computed_anew_from_the_initial_weights(ranks, folder):
    broken = interrupted(ranks, folder, "damaged", 1, OPTIONS, 6)
    before = reference(broken)
    damage(broken / "reference" / "train.npy")
    resumed = ranks(1, train, f"{folder}/model", f"{folder}/store", str(broken), OPTIONS, PREFERENCE)
    after = reference(broken)
    assert after["train"][0] > before["train"][0]
    assert (after["train"][1] == before["train"][1]).all(), "trained weights would give other numbers"
    assert json.loads((broken / "train_result.json").read_text())["eval_loss"] == resumed[0]["result"]["eval_loss"]


def test_another_layout_goes_on_with_the_reference_that_is_there(ranks, folder):
    broken = interrupted(ranks, folder, "relayout", 2, {**OPTIONS, "tensor_model_parallel_size": 2}, 6)
    before = reference(broken)
    options = {**OPTIONS, "context_parallel_size": 2}
    resumed = ranks(2, train, f"{folder}/model", f"{folder}/store", str(broken), options, PREFERENCE)
    straight = ranks(1, train, f"{folder}/model", f"{folder}/store", str(folder / "straight"), OPTIONS, PREFERENCE)
    assert np.abs(history(resumed) - history(straight)).max() < 1e-4
    assert reference(broken)["train"][0] == before["train"][0]


def test_the_reference_of_another_model_or_run_is_refused(ranks, folder):
    out = interrupted(ranks, folder, "foreign", 1, OPTIONS, 1)
    change_weights(Path(shutil.copytree(folder / "model", folder / "other weights")))
    with pytest.raises(RankError, match=r"CheckpointError: .*reference was made with base model='\w+', this run has"):
        ranks(1, train, f"{folder}/other weights", f"{folder}/store", str(out), OPTIONS, PREFERENCE)
    with pytest.raises(RankError, match=r"CheckpointError: .*reference holds log-probabilities of another model"):
        ranks(1, train_changed, f"{folder}/model", f"{folder}/store", str(out), OPTIONS)
    for split, name in (("train", "data"), ("eval", "eval data")):
        change_tokens(Path(shutil.copytree(folder / "store", folder / f"other {split}")) / split)
        with pytest.raises(RankError, match=rf"CheckpointError: .*reference was made with {name}="):
            ranks(1, train, f"{folder}/model", f"{folder}/other {split}", str(out), OPTIONS, PREFERENCE)
    with pytest.raises(RankError, match=r"CheckpointError: .*reference was made with total_steps=10"):
        ranks(1, train, f"{folder}/model", f"{folder}/store", str(out), {**OPTIONS, "max_steps": 3}, PREFERENCE)


def test_a_checkpoint_of_another_loss_is_refused(ranks, folder):
    out = interrupted(ranks, folder, "loss", 1, OPTIONS, 4)
    with pytest.raises(RankError, match=r"CheckpointError: .*checkpoint-2 was made with preference="):
        ranks(1, train, f"{folder}/model", f"{folder}/store", str(out), OPTIONS, {"pref_loss": "hinge"})
