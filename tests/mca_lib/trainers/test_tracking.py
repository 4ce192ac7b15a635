"""Trackers get the figures of the log under transformers' names, each step once."""

import signal
from pathlib import Path

import pytest

from mca_lib.errors import ConfigError
from mca_lib.trainers import tracking
from mca_lib.trainers.progress import read_log
from mca_lib.trainers.tracking import check_trackers
from tests.mca_lib.trainers.test_resume import train_until
from tests.mca_lib.trainers.training import make_model, make_store, train
from tests.ranks import RankError

OPTIONS = {"max_steps": 6, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "report_to": ["tensorboard"]}


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag → steps and values, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_each_step_once_after_a_kill(ranks, tmp_path):
    ranks(1, make_model, tmp_path / "model")
    make_store(tmp_path / "store", rows=12)
    make_store(tmp_path / "store", rows=3, split="eval", seed=9)
    places, out = (f"{tmp_path}/model", f"{tmp_path}/store"), tmp_path / "out"
    with pytest.raises(RankError, match="exit -9"):
        ranks(2, train_until, *places, str(out), OPTIONS, 6, signal.SIGKILL)  # resumes after step 4, of 5
    ranks(2, train, *places, str(out), OPTIONS)
    assert len(list((out / "runs").glob("events.*"))) == 2, "rank 0 of each attempt alone"
    shown, lines = scalars(out / "runs"), read_log(out)
    for tag, name in (
        *[("train/loss", "loss"), ("train/grad_norm", "grad_norm"), ("train/learning_rate", "learning_rate")],
        *[("train/mfu", "mfu"), ("eval/loss", "eval_loss")],
    ):
        steps, values = zip(*shown[tag], strict=True)
        assert list(steps) == ([2, 4, 6] if tag == "eval/loss" else [1, 2, 3, 4, 5, 6]), tag
        assert values == pytest.approx([line[name] for line in lines if name in line], rel=1e-6), tag


def test_trackers_that_are_unknown_or_not_installed_are_refused(monkeypatch):
    check_trackers(["tensorboard"])
    with pytest.raises(ConfigError, match="report_to: 'comet' is not one of tensorboard, wandb, mlflow"):
        check_trackers(["comet"])
    monkeypatch.setattr(tracking, "TRACKERS", ("no_such_tracker",))
    with pytest.raises(ConfigError, match="report_to: the package no_such_tracker is not installed"):
        check_trackers(["no_such_tracker"])
