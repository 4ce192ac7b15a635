"""transformers' callbacks hear what happens in the Megatron loop, and what one rank's asks for is done on all."""

import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback

from tests.mca_lib.trainers.training import HYPERPARAMETERS, kill_in_step, make_model, make_store
from tests.ranks import RankError


class Recorder(TrainerCallback):
    """Every event with its step, but those of single steps; and the last state."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and "_step" not in name:
            return lambda args, state, control, **details: self._heard(name, state, details)
        return super().__getattribute__(name)

    def _heard(self, name: str, state: Any, details: dict[str, Any]) -> None:
        self.state, self.model = state, details["model"]
        self.events.append((name.removeprefix("on_"), state.global_step))


class Wishing(TrainerCallback):
    """Rank 1 alone asks for things."""

    def on_step_end(self, args, state, control, **_: Any) -> None:
        if not state.is_world_process_zero:
            control.should_save = state.global_step == 1
            control.should_evaluate = state.global_step == 3
            control.should_log = state.global_step == 3
            control.should_training_stop = state.global_step == 4


class Substeps(TrainerCallback):
    def on_substep_end(self, *_: Any, **__: Any) -> None:
        pass


class ShortEpochs(TrainerCallback):
    def on_step_end(self, args, state, control, **_: Any) -> None:
        control.should_epoch_stop = True


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("callbacks")
    ranks(1, make_model, folder / "model")
    make_store(folder / "store", rows=12)  # 3 steps per epoch
    make_store(folder / "store", rows=3, split="eval", seed=9)
    return folder


def train_with(
    folder: Path, out: str, options: dict[str, Any], callbacks: list[Any], kill: int | None = None
) -> tuple[dict[str, Any], list[tuple[str, int]], dict[str, Any]]:
    """Result, events, and the callbacks' state at the end."""
    from mca_lib.data.token_store import TokenStore
    from mca_lib.models import AutoModel
    from mca_lib.parallel import initialize_model_parallel
    from mca_lib.trainers import McaTrainer, Seq2SeqTrainingArguments

    if kill:
        kill_in_step(kill, signal.SIGKILL)
    args = Seq2SeqTrainingArguments(output_dir=str(folder / out), **{**HYPERPARAMETERS, **options})
    initialize_model_parallel(args, args.seed)
    stores = [TokenStore.open(folder / "store" / split) for split in ("train", "eval")]
    recorder, model = Recorder(), AutoModel.from_pretrained(folder / "model", args)
    result = McaTrainer(model, args, *stores, callbacks=[recorder, *callbacks]).train()
    assert recorder.model is model
    state = recorder.state
    last = {"tokens": state.num_input_tokens_seen, "epoch": state.epoch, "log": state.log_history}
    return asdict(result), recorder.events, last


def test_callbacks_hear_of_everything_in_transformers_order(ranks, folder):
    options = {"max_steps": 5, "logging_steps": 2, "save_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    for result, events, state in ranks(2, train_with, folder, "heard", options, []):
        assert events == [
            *[("init_end", 0), ("train_begin", 0), ("epoch_begin", 0)],
            *[("log", 2), ("log", 2), ("evaluate", 2), ("epoch_end", 3), ("epoch_begin", 3)],
            *[("log", 4), ("log", 4), ("evaluate", 4), ("save", 4)],
            *[("log", 5), ("save", 5), ("log", 5), ("evaluate", 5), ("log", 5), ("train_end", 5)],
        ]
        assert state["tokens"] == result["tokens"]
        assert state["epoch"] == pytest.approx(5 / 3)
        names = {"loss", "grad_norm", "learning_rate", "epoch", "step", "tokens_per_second", "mfu", "memory_mb"}
        assert names <= state["log"][0].keys()
        assert {"eval_loss", "eval_runtime", "epoch", "step"} == state["log"][1].keys()


def test_what_one_rank_asks_for_is_done_on_all(ranks, folder):
    options = {"max_steps": 6, "logging_strategy": "no", "save_steps": 100}
    for result, events, _ in ranks(2, train_with, folder, "asked", options, [Wishing]):
        told = [event for event in events if event[0] in ("log", "evaluate", "save")]
        assert told[:6] == [("save", 1), ("log", 3), ("log", 3), ("evaluate", 3), ("log", 4), ("save", 4)]
        assert result["steps"] == 4
    assert sorted(path.name for path in (folder / "asked").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-4"]
    # As after a crash in the last evaluation: the wish to stop is a part of the checkpoint.
    for result, _, state in ranks(2, train_with, folder, "asked", options, [Wishing]):
        assert result["steps"] == 4
        assert [line["step"] for line in state["log"] if "eval_loss" in line] == [3, 4]
    assert (folder / "asked" / "final").is_dir()


def test_a_callback_with_a_memory_has_it_after_resuming(ranks, folder):
    options = {"max_steps": 6, "learning_rate": 1e-30, "save_steps": 2, "metric_for_best_model": "loss"}
    options |= {"eval_strategy": "steps", "eval_steps": 1}
    patient = [EarlyStoppingCallback(early_stopping_patience=2)]
    with pytest.raises(RankError, match="exit -9"):
        ranks(1, train_with, folder, "stopped", options, patient, 3)
    ((result, events, _),) = ranks(1, train_with, folder, "stopped", options, patient)
    # The first evaluation is the best, the second was before the kill, the third is the second that is no better.
    assert result["steps"] == 3
    assert [event for event in events if event[0] == "evaluate"] == [("evaluate", 3)]


@pytest.mark.parametrize(
    ("callback", "said"),
    [(Substeps, "callback Substeps waits for on_substep_end"), (ShortEpochs, "a callback set should_epoch_stop")],
)
def test_what_the_loop_cannot_do_is_refused(ranks, folder, callback, said):
    with pytest.raises(RankError, match=f"ConfigError: {said}"):
        ranks(1, train_with, folder, callback.__name__, {"max_steps": 2}, [callback])
