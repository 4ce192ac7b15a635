"""What the trainer measures and says: evaluation, learning rates, precision, progress, and when it gives up."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.mca_lib.trainers.training import HYPERPARAMETERS, history, make_model, make_store, train, weights
from tests.ranks import RankError


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trainer")
    ranks(1, make_model, folder / "model")
    make_store(folder / "store", rows=6)
    make_store(folder / "store", rows=5, split="eval", seed=9)  # divides by no number of ranks
    return folder


def plain_evaluation(model: str, split: str) -> float:
    """Token mean over every row, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    from mca_lib.data.token_store import TokenStore

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    loss_sum, count = 0.0, 0
    for row in TokenStore.open(split):
        bounds = [0, *np.cumsum(row.document_lengths)]
        for begin, end in itertools.pairwise(bounds):
            with torch.no_grad():
                logits = network(input_ids=torch.from_numpy(row.input_ids[begin:end])[None]).logits[0]
            labels = torch.from_numpy(row.labels[begin:end])
            loss_sum += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            count += int((labels != -100).sum())
    return loss_sum / count


def evaluate(model: str, split: str, options: dict[str, Any]) -> float:
    """Loss by the trainer, before any step."""
    from mca_lib.data.token_store import TokenStore
    from mca_lib.models import AutoModel
    from mca_lib.parallel import initialize_model_parallel
    from mca_lib.trainers import McaTrainer, Seq2SeqTrainingArguments

    args = Seq2SeqTrainingArguments(output_dir=".", **{**HYPERPARAMETERS, **options})
    initialize_model_parallel(args)
    rows = TokenStore.open(split)
    return McaTrainer(AutoModel.from_pretrained(model, args), args, rows, rows).evaluate().loss


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {"per_device_eval_batch_size": 2}),
        (2, {"per_device_eval_batch_size": 2}),
        (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
        (2, {"context_parallel_size": 2}),
    ],
    ids=["one rank", "DP2", "PP2 in two chunks", "CP2"],
)
def test_evaluation_covers_every_held_out_row_once(ranks, folder, world_size, options):
    (plain,) = ranks(1, plain_evaluation, f"{folder}/model", f"{folder}/store/eval")
    for loss in ranks(world_size, evaluate, f"{folder}/model", f"{folder}/store/eval", options):
        assert loss == pytest.approx(plain, abs=1e-4)


def scheduled(name: str, steps: int) -> list[float]:
    """Learning rates of transformers' schedule."""
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=HYPERPARAMETERS["learning_rate"])
    scheduler = get_scheduler(name, optimizer, HYPERPARAMETERS["warmup_steps"], steps)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("name", ["linear", "cosine", "constant_with_warmup"])
def test_learning_rates_are_those_of_transformers(ranks, folder, name):
    options = {"max_steps": 6, "lr_scheduler_type": name}
    values = ranks(1, train, f"{folder}/model", f"{folder}/store", f"{folder}/{name}", options)
    rates = [line["learning_rate"] for line in values[0]["log"]]
    assert rates == pytest.approx(ranks(1, scheduled, name, 6)[0], rel=1e-6)


def warmup_stable_decay(options: dict[str, Any], steps: int) -> tuple[list[float], list[float]]:
    """Learning rates of the engine's schedule, and of transformers'."""
    import types

    import torch
    from transformers import get_wsd_schedule

    from mca_lib.trainers import Seq2SeqTrainingArguments
    from mca_lib.trainers.optimizer import make_scheduler

    settings = {"learning_rate": 3e-4, "lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 3, **options}
    args = Seq2SeqTrainingArguments(output_dir=".", **settings)
    group = {}
    ours = make_scheduler(args, types.SimpleNamespace(param_groups=[group]), steps)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
    theirs = get_wsd_schedule(
        optimizer,
        num_warmup_steps=args.get_warmup_steps(steps),
        num_decay_steps=round(args.decay_ratio * steps),
        num_training_steps=steps,
        decay_type={"minus_sqrt": "1-sqrt"}.get(args.decay_style, args.decay_style),
        min_lr_ratio=args.min_learning_rate / args.learning_rate,
    )
    rates = [], []
    for _ in range(steps + 1):
        rates[0].append(group["lr"])
        rates[1].append(theirs.get_last_lr()[0])
        ours.step(1)
        optimizer.step()
        theirs.step()
    return rates


@pytest.mark.parametrize("style", ["linear", "cosine", "minus_sqrt"])
def test_warmup_stable_decay_is_that_of_transformers(ranks, style):
    options = {"decay_style": style, "decay_ratio": 0.25, "min_learning_rate": 3e-5}
    ours, theirs = ranks(1, warmup_stable_decay, options, 40)[0]
    assert ours == pytest.approx(theirs, rel=1e-12)
    assert (ours[3], ours[30], ours[40]) == pytest.approx((3e-4, 3e-4, 3e-5))


def test_a_decay_of_all_steps_begins_after_the_warm_up(ranks):
    ours, _ = ranks(1, warmup_stable_decay, {"decay_ratio": 1.0, "warmup_steps": 8}, 20)[0]
    assert ours[8] == max(ours) == 3e-4
    assert ours[20] == 0


def test_the_schedule_ends_at_the_minimum_learning_rate(ranks, folder):
    options = {"max_steps": 30, "min_learning_rate": 1e-3, "lr_scheduler_type": "cosine"}
    values = ranks(1, train, f"{folder}/model", f"{folder}/store", f"{folder}/minimum", options)
    assert values[0]["log"][-1]["learning_rate"] == pytest.approx(1e-3, rel=0.02)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.02), ("fp16", 0.003)])
def test_half_precision_follows_fp32(ranks, folder, precision, tolerance):
    places = f"{folder}/model", f"{folder}/store"
    fp32, half = (
        ranks(1, train, *places, f"{folder}/{precision} {x}", {"max_steps": 10, precision: x}) for x in (False, True)
    )
    # A rounding is 0.4 % in bf16 with its 8 bits of mantissa, 0.05 % in fp16 with 11.
    np.testing.assert_allclose(history(half)[:, 0], history(fp32)[:, 0], rtol=tolerance)
    assert not np.array_equal(history(half), history(fp32))
    assert ("loss_scale" in half[0]["log"][0]) == (precision == "fp16")


def train_from_a_scale(model: str, store: str, out: str, options: dict[str, Any], scale: float) -> dict[str, Any]:
    """Train with another loss scale to begin with."""
    from mca_lib.trainers import optimizer

    optimizer.INITIAL_LOSS_SCALE = scale
    return train(model, store, out, options)


@pytest.mark.parametrize(("world_size", "layout"), [(1, {}), (2, {"pipeline_model_parallel_size": 2})])
def test_steps_whose_fp16_gradients_overflow_are_skipped(ranks, folder, world_size, layout):
    out, options = f"{folder}/overflow {world_size}", {"max_steps": 12, "fp16": True, "warmup_steps": 4, **layout}
    values = ranks(world_size, train_from_a_scale, f"{folder}/model", f"{folder}/store", out, options, 2.0**16)
    log = values[0]["log"]
    skipped = [line["grad_norm"] is None for line in log]
    assert skipped[:2] == [True, True]
    assert sum(skipped) == log[-1]["skipped_steps"] < 8
    # Two overflows for the first halving, then one for each.
    assert log[-1]["loss_scale"] == 2.0 ** (16 - (sum(skipped) - 1))
    updates = [step - sum(skipped[:step]) for step in range(12)]
    rates = [line["learning_rate"] for line in log if updates[line["step"] - 1] <= 4]
    expected = [HYPERPARAMETERS["learning_rate"] * done / 4 for done in updates if done <= 4]
    assert rates == pytest.approx(expected), "the schedule counts updates"


def test_fp16_that_overflows_at_any_scale_is_an_error(ranks, folder):
    out, options = f"{folder}/no scale", {"max_steps": 9, "fp16": True}
    with pytest.raises(RankError, match=r"ConfigError: training diverged: the loss scale of fp16 fell to its minimum"):
        ranks(1, train_without_a_scale, f"{folder}/model", f"{folder}/store", out, options)


def train_without_a_scale(model: str, store: str, out: str, options: dict[str, Any]) -> None:
    """Train with gradients that no scale can hold."""
    from mca_lib.trainers import engine

    engine.MIN_LOSS_SCALE = 2.0**25
    train_from_a_scale(model, store, out, options, 2.0**26)


def test_without_clipping_the_gradient_norm_is_still_measured(ranks, folder):
    values = ranks(
        1, train, f"{folder}/model", f"{folder}/store", f"{folder}/unclipped", {"max_steps": 3, "max_grad_norm": 0.0}
    )
    clipped = ranks(1, train, f"{folder}/model", f"{folder}/store", f"{folder}/clipped", {"max_steps": 3})
    assert history(values)[0, 1] == history(clipped)[0, 1] > 1.0
    assert not np.array_equal(history(values)[2], history(clipped)[2])


def test_divergence_stops_the_run_and_names_the_learning_rate(ranks, folder):
    options = {"max_steps": 6, "learning_rate": 1e20, "warmup_steps": 0}
    with pytest.raises(RankError, match=r"ConfigError: training diverged: .* at step \d; lower learning_rate=1e\+20"):
        ranks(1, train, f"{folder}/model", f"{folder}/store", f"{folder}/diverged", options)
    assert not (folder / "diverged" / "final").exists()


def test_a_step_without_any_loss_changes_nothing_and_has_no_loss(ranks, folder):
    """One epoch of two steps; none of the second step's rows has a token with loss."""
    from mca_lib.trainers.schedule import Schedule

    make_store(folder / "silent", rows=8, masked=Schedule(8, 4, HYPERPARAMETERS["seed"]).rows(1))
    places, options = (f"{folder}/model", f"{folder}/silent"), {"weight_decay": 0.0, "adam_beta1": 0.0}
    values = ranks(2, train, *places, f"{folder}/silent-2", {**options, "warmup_steps": 0, "max_steps": 2})
    ranks(2, train, *places, f"{folder}/silent-1", {**options, "warmup_steps": 0, "max_steps": 1})
    before, after = ranks(1, both_weights, folder / "silent-1" / "final", folder / "silent-2" / "final")[0]
    assert before == after
    assert [line["loss"] is None for line in values[0]["log"]] == [False, True]
    assert values[0]["result"]["final_loss"] is None
    assert values[0]["result"]["train_loss"] == values[0]["log"][0]["loss"]


def test_rows_without_any_loss_are_refused_before_the_first_step(ranks, folder):
    make_store(folder / "masked", rows=4, masked=range(4))
    with pytest.raises(RankError, match=r"DataError: token store .*train: no token has loss"):
        ranks(1, train, f"{folder}/model", f"{folder}/masked", f"{folder}/masked out", {"max_steps": 1})
    make_store(folder / "held masked", rows=4)
    make_store(folder / "held masked", rows=2, split="eval", masked=range(2))
    places, out = (f"{folder}/model", f"{folder}/held masked"), folder / "held out"
    options = {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    with pytest.raises(RankError, match=r"DataError: token store .*eval: no token has loss, .* nothing to evaluate"):
        ranks(1, train, *places, str(out), options)
    assert not (out / "training_log.jsonl").exists()


def both_weights(one: Path, other: Path) -> tuple[float, float]:
    return tuple(sum(t.double().abs().sum().item() for t in weights(path).values()) for path in (one, other))


def test_evaluation_without_held_out_rows_is_refused_at_the_start(ranks, folder):
    make_store(folder / "train only", rows=4)
    with pytest.raises(RankError, match=r"ConfigError: eval_strategy='epoch', but the token store has no split 'eval'"):
        ranks(1, train, f"{folder}/model", f"{folder}/train only", f"{folder}/refused", {"eval_strategy": "epoch"})


def train_with_progress(model: str, store: str, out: str, options: dict[str, Any], progress: str) -> None:
    os.environ["MCAFLOW_PROGRESS"] = progress
    train(model, store, out, options)


def test_progress_lines_say_how_far_how_fast_and_how_long(ranks, folder):
    progress = folder / "progress.jsonl"
    options = {"num_train_epochs": 2, "eval_strategy": "epoch", "logging_steps": 2}
    ranks(2, train_with_progress, f"{folder}/model", f"{folder}/store", f"{folder}/progress", options, str(progress))
    lines = [json.loads(line) for line in progress.read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [(line["done"], line["total"], line["epoch"]) for line in steps] == [(2, 4, 1.0), (4, 4, 2.0)]
    for line in steps:
        assert line["tokens_per_second"] == pytest.approx(2 * line["tokens_per_second_per_device"], abs=0.2)
        assert 0 < line["mfu"] < 1
        assert 0 < line["data_wait"] < 1
        assert line["eta_seconds"] >= 0
        assert line["memory_mb"] > 0
    evaluations = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [2, 4]
    assert evaluations[1]["eval_loss"] < evaluations[0]["eval_loss"]


def test_a_logged_loss_is_the_token_mean_since_the_line_before(ranks, folder):
    places = f"{folder}/model", f"{folder}/store"
    each = ranks(1, train, *places, f"{folder}/each", {"max_steps": 4})[0]
    pairs = ranks(1, train, *places, f"{folder}/pairs", {"max_steps": 4, "logging_steps": 2})[0]
    assert each["result"]["train_loss"] == pairs["result"]["train_loss"]
    low, high = sorted(line["loss"] for line in each["log"][:2])
    assert low <= pairs["log"][0]["loss"] <= high
