"""A run that was killed and resumed ends with the same bits as one that was never interrupted."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from mca_lib.checkpoint.sealed import find_damage
from mca_lib.trainers.progress import read_log
from tests.mca_lib.checkpoint.expert_ranks import make_sources
from tests.mca_lib.trainers.training import (
    history,
    kill_in_step,
    make_model,
    make_store,
    read_json,
    train,
    train_in_buckets,
    weights,
)
from tests.ranks import RankError

OPTIONS = {"num_train_epochs": 2, "save_steps": 2, "save_total_limit": 2}  # 10 steps
ASYNC = {**OPTIONS, "async_save": True}

LAYOUTS = {
    "one rank": (1, {}),
    "DP2 bf16": (2, {"bf16": True}),
    "DP2 fp16 without the distributed optimizer": (2, {"fp16": True, "use_distributed_optimizer": False}),
    "TP2 fp16": (2, {"fp16": True, "tensor_model_parallel_size": 2}),
    "PP2 in two chunks": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    # Dropout, so that random states count too.
    ranks(1, make_model, folder / "model", 0.1)
    make_store(folder / "store", rows=18)
    make_store(folder / "store", rows=5, split="eval", seed=9)
    return folder


def train_until(model: str, store: str, out: str, options: dict[str, Any], step: int, kill: int) -> None:
    """Train, and send this rank the signal `kill` in the middle of the given step."""
    kill_in_step(step, kill)
    train(model, store, out, options)


def train_until_seal(model: str, store: str, out: str, options: dict[str, Any], nth: int, after: bool) -> None:
    """Train, and die while the n-th checkpoint is written: before its record, or just after it got its name."""
    from mca_lib.checkpoint import saver

    original, done = saver.seal, []

    def dying(staging, target, meta):
        done.append(1)
        if len(done) == nth and after:
            original(staging, target, meta)
        if len(done) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        original(staging, target, meta)

    saver.seal = dying
    train(model, store, out, options)


def train_until_over(
    model: str, store: str, out: str, options: dict[str, Any], method: str = "", kill: int = 0
) -> tuple[int, dict[str, Any]]:
    """Train, and send this rank the signal `kill` in a method that is called after the last step.

    Returns the number of steps made, and what `train` returns.
    """
    from mca_lib.trainers.engine import Engine
    from mca_lib.trainers.trainer import McaTrainer

    steps, step = [], Engine.train_step

    def counting(self, batches):
        steps.append(1)
        return step(self, batches)

    Engine.train_step = counting
    if kill:
        original = getattr(McaTrainer, method)

        def dying(self, *args):
            os.kill(os.getpid(), kill)
            return original(self, *args)

        setattr(McaTrainer, method, dying)
    result = train(model, store, out, options)
    return len(steps), result


@pytest.mark.parametrize(
    ("method", "kill", "saves"),
    [
        ("evaluate", signal.SIGKILL, True),
        ("save_model", signal.SIGKILL, True),
        ("_finish", signal.SIGKILL, True),
        ("evaluate", signal.SIGTERM, False),
    ],
)
def test_what_comes_after_the_last_step_costs_none(ranks, folder, method, kill, saves):
    places, out = (f"{folder}/model", f"{folder}/store"), folder / f"over {method} {kill}"
    straight = ranks(1, train, *places, str(folder / "reference"), ASYNC)
    options = ASYNC if saves else {**ASYNC, "save_steps": 0}
    with pytest.raises(RankError, match="exit -9" if kill == signal.SIGKILL else "SystemExit: 143"):
        ranks(1, train_until_over, *places, str(out), options, method, kill)
    if kill == signal.SIGTERM:
        assert find_damage(out / "final") is None
        assert read_json(out / "train_result.json")["eval_loss"] == straight[0]["result"]["eval_loss"]
        return
    assert not (out / "train_result.json").exists()
    ((steps, resumed),) = ranks(1, train_until_over, *places, str(out), ASYNC)
    assert steps == 0
    assert ranks(1, same_weights, out / "final", folder / "reference" / "final") == [True]
    for name in ("eval_loss", "train_loss", "tokens", "final_loss", "steps"):
        assert resumed["result"][name] == straight[0]["result"][name], name
    logged = [[(line["step"], "eval_loss" in line) for line in read_log(path)] for path in (out, folder / "reference")]
    assert logged[0] == logged[1]


def same_weights(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_and_resumed_equals_uninterrupted_bitwise(ranks, folder, layout):
    world_size, extra = LAYOUTS[layout]
    options = {**ASYNC, **extra}
    places = f"{folder}/model", f"{folder}/store"
    whole, broken = folder / f"whole {layout}", folder / f"broken {layout}"
    uninterrupted = ranks(world_size, train, *places, str(whole), options)
    with pytest.raises(RankError, match="exit -9"):
        ranks(world_size, train_until, *places, str(broken), options, 6, signal.SIGKILL)
    assert not (broken / "final").exists()
    resumed = ranks(world_size, train, *places, str(broken), options)
    assert ranks(1, same_weights, whole / "final", broken / "final") == [True]
    assert (history(resumed) == history(uninterrupted)).all(), "each step is in the log once, with the same figures"
    for name in ("eval_loss", "train_loss", "tokens", "trained_tokens", "final_loss"):
        assert resumed[0]["result"][name] == uninterrupted[0]["result"][name], name


@pytest.mark.parametrize("after", [False, True], ids=["before its record", "after its rename"])
def test_a_kill_while_a_checkpoint_is_written_loses_at_most_that_checkpoint(ranks, folder, after):
    places, out = (f"{folder}/model", f"{folder}/store"), folder / f"writing {after}"
    with pytest.raises(RankError, match="exit -9"):
        ranks(1, train_until_seal, *places, str(out), ASYNC, 3, after)
    found = sorted(path.name for path in out.glob("checkpoint-*"))
    assert found == (["checkpoint-2", "checkpoint-4", "checkpoint-6"] if after else ["checkpoint-2", "checkpoint-4"])
    ranks(1, train, *places, str(out), ASYNC)
    ranks(1, train, *places, str(folder / "reference"), ASYNC)
    assert ranks(1, same_weights, out / "final", folder / "reference" / "final") == [True]
    assert not list(out.glob(".staging-*"))


def test_a_checkpoint_resumes_at_another_layout(ranks, folder):
    places, out = (f"{folder}/tied", f"{folder}/store"), folder / "relayout"
    # Tied embeddings, and a vocabulary that is padded for two tensor parallel ranks and not for one.
    ranks(1, make_model, folder / "tied", 0.0, True, 131)
    with pytest.raises(RankError, match="exit -9"):
        ranks(2, train_until, *places, str(out), {**OPTIONS, "tensor_model_parallel_size": 2}, 6, signal.SIGKILL)
    resumed = ranks(2, train, *places, str(out), {**OPTIONS, "pipeline_model_parallel_size": 2})
    straight = ranks(1, train, *places, str(folder / "straight"), OPTIONS)
    assert abs(history(resumed) - history(straight)).max() < 1e-4


def train_as_megatron_saves(model: str, store: str, out: str, options: dict[str, Any], kill_at: int) -> None:
    """With checkpoints of several buckets as Megatron alone writes them."""
    import contextlib

    from mca_lib.checkpoint import training

    training.places_without_padding = contextlib.nullcontext
    train_in_buckets(model, store, out, options, kill_at)


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "Megatron's alone"])
def test_optimizer_states_of_several_buckets_resume_at_another_layout(ranks, folder, ours):
    places, out = (f"{folder}/no dropout", f"{folder}/store"), folder / f"buckets {ours}"
    ranks(1, make_model, folder / "no dropout")
    options = {**OPTIONS, "overlap_grad_reduce": True, "overlap_param_gather": True}
    with pytest.raises(RankError, match="exit -9"):
        ranks(2, train_in_buckets if ours else train_as_megatron_saves, *places, str(out), options, 6)
    resumed = ranks(2, train_in_buckets, *places, str(out), {**OPTIONS, "tensor_model_parallel_size": 2})
    straight = ranks(1, train, *places, str(folder / f"{out.name} straight"), OPTIONS)
    worst = abs(history(resumed) - history(straight)).max()
    # When Megatron's alone are right, mca_lib.checkpoint.buckets is not needed any more.
    assert worst < 1e-4 if ours else worst > 1e-3


EXPERTS = {"expert_model_parallel_size": 2}
EXPERT_OPTIONS = {
    "qwen2-moe": {"max_steps": 4, "save_steps": 2},
    "deepseek-mtp": {"max_steps": 4, "save_steps": 2, "moe_router_bias_update_rate": 0.01},
}


@pytest.fixture(scope="module", params=["qwen2-moe", "deepseek-mtp"])
def killed(request, ranks, folder) -> tuple[str, Path]:
    """A model with experts, and the output of its training on two expert parallel ranks, killed in step 3."""
    variant, out = request.param, folder / f"{request.param} killed"
    ranks(1, make_sources, folder, [variant], "float32")
    options = {**EXPERT_OPTIONS[variant], **EXPERTS}
    with pytest.raises(RankError, match="exit -9"):
        ranks(2, train_until, f"{folder}/{variant}", f"{folder}/store", str(out), options, 3, signal.SIGKILL)
    return variant, out


@pytest.mark.parametrize(
    ("world_size", "other"),
    # On one rank Megatron has one optimizer, and one more for experts that are spread.
    [(2, {}), (4, {"pipeline_model_parallel_size": 2}), (1, {"expert_model_parallel_size": 1})],
)
def test_a_model_with_experts_resumes_at_its_own_and_at_another_layout(ranks, folder, killed, world_size, other):
    variant, out = killed
    places, resumed = (f"{folder}/{variant}", f"{folder}/store"), folder / f"{variant} on {world_size}"
    shutil.copytree(out, resumed)
    values = ranks(world_size, train, *places, str(resumed), {**EXPERT_OPTIONS[variant], **EXPERTS, **other})
    straight = folder / f"{resumed.name} straight"
    uninterrupted = ranks(1, train, *places, str(straight), EXPERT_OPTIONS[variant])
    assert len(history(values)) == 4
    assert abs(history(values) - history(uninterrupted)).max() < 1e-4
    biases, expected = (
        {name: bias.tolist() for name, bias in weights(path / "final").items() if name.endswith("expert_bias")}
        for path in (resumed, straight)
    )
    assert biases == expected, "they move by steps, which rounding does not change"
    assert bool(biases) == (variant == "deepseek-mtp")


def test_an_optimizer_that_is_not_distributed_does_not_gather_spread_experts(ranks, folder):
    ranks(1, make_sources, folder, ["qwen2-moe"], "float32")
    places, out = (f"{folder}/qwen2-moe", f"{folder}/store"), folder / "experts"
    options = {"max_steps": 2, "save_steps": 1, "use_distributed_optimizer": False}
    ranks(2, train, *places, str(out), {**options, **EXPERTS})
    message = r"checkpoint-2 was made with expert=2 expert tensor=1, this run has expert=1 .* or remove .*experts to tr"
    with pytest.raises(RankError, match=message):
        ranks(1, train, *places, str(out), options)


@pytest.mark.parametrize("distributed", [False, True])
def test_an_optimizer_of_the_other_form_is_refused(ranks, folder, distributed):
    places, out = (f"{folder}/model", f"{folder}/store"), folder / f"form {distributed}"
    options = {"max_steps": 2, "save_steps": 1, "use_distributed_optimizer": distributed}
    ranks(1, train, *places, str(out), options)
    message = f"checkpoint-2 was made with use_distributed_optimizer={distributed}, this run has {not distributed}: "
    with pytest.raises(RankError, match=message):
        ranks(1, train, *places, str(out), {**options, "use_distributed_optimizer": not distributed})


def damage(path: Path) -> None:
    """Flip one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def change_weights(model: Path) -> None:
    """By a little, and none of their sizes."""
    tensors = load_file(model / "model.safetensors")
    save_file({name: tensor * 1.001 for name, tensor in tensors.items()}, model / "model.safetensors", {"format": "pt"})


def change_tokens(split: Path) -> None:
    tokens_T = np.load(split / "tokens.npy")
    np.save(split / "tokens.npy", tokens_T[::-1])


@pytest.mark.parametrize("damaged", [("checkpoint-6",), ("checkpoint-4", "checkpoint-6")], ids=["newest", "all"])
def test_damaged_checkpoints_are_set_aside_for_the_one_before_or_the_start(ranks, folder, damaged):
    places, out = (f"{folder}/model", f"{folder}/store"), folder / f"{len(damaged)} damaged"
    with pytest.raises(RankError, match="exit -9"):
        ranks(1, train_until, *places, str(out), OPTIONS, 8, signal.SIGKILL)
    for name in damaged:
        damage(max((out / name / "state").glob("*.distcp"), key=lambda path: path.stat().st_size))
    ranks(1, train, *places, str(out), OPTIONS)
    ranks(1, train, *places, str(folder / "reference"), OPTIONS)
    assert ranks(1, same_weights, out / "final", folder / "reference" / "final") == [True]
    assert sorted(path.name[:-7] for path in out.glob("damaged-*")) == [f"damaged-{name}" for name in damaged]


def test_a_checkpoint_of_a_run_with_other_settings_is_refused(ranks, folder):
    places, out = (f"{folder}/model", f"{folder}/store"), folder / "other"
    with pytest.raises(RankError, match="exit -9"):
        ranks(1, train_until, *places, str(out), OPTIONS, 4, signal.SIGKILL)
    with pytest.raises(RankError, match=r"CheckpointError: .*checkpoint-2 was made with learning_rate=0\.005"):
        ranks(1, train, *places, str(out), {**OPTIONS, "learning_rate": 1e-3})
    ranks(1, make_model, folder / "other model", 0.1, False, 131)
    with pytest.raises(RankError, match=r"CheckpointError: .*made with vocab_size=128, this run has 131"):
        ranks(1, train, f"{folder}/other model", places[1], str(out), OPTIONS)
    change_weights(Path(shutil.copytree(folder / "model", folder / "other weights")))
    with pytest.raises(RankError, match=r"CheckpointError: .*made with base model='\w+', this run has"):
        ranks(1, train, f"{folder}/other weights", places[1], str(out), OPTIONS)
    change_tokens(Path(shutil.copytree(folder / "store", folder / "other store")) / "train")
    with pytest.raises(RankError, match=r"CheckpointError: .*made with data='\w+', this run has"):
        ranks(1, train, places[0], f"{folder}/other store", str(out), OPTIONS)
    without_effect = {"decay_ratio": 0.5, "mtp_loss_weight": 0.3}
    (value,) = ranks(1, train, *places, str(out), {**OPTIONS, **without_effect})
    assert value["log"][0]["step"] == 1, "the log goes on where the killed run was"


def test_the_result_says_what_was_trained(ranks, folder):
    from mca_lib.data.token_store import TokenStore

    out = folder / "result"
    ranks(2, train, f"{folder}/model", f"{folder}/store", str(out), OPTIONS)
    result, rows = read_json(out / "train_result.json"), TokenStore.open(folder / "store" / "train")
    assert (result["steps"], result["epochs"], result["world_size"]) == (10, 2.0, 2)
    assert result["tokens"] == 2 * rows.num_tokens
    assert result["trained_tokens"] == 2 * rows.num_loss_tokens
    assert len(result["peak_memory_mb"]) == 2
