"""A preflight finds what would fail later, and the run after it is the same as without, bit for bit."""

import resource
from pathlib import Path
from typing import Any

import pytest

from tests.mca_lib.checkpoint.expert_ranks import make_sources
from tests.mca_lib.trainers.test_resume import same_weights
from tests.mca_lib.trainers.training import history, make_model, make_store, train
from tests.ranks import RankError

OPTIONS = {"max_steps": 3, "save_steps": 2}
LAYOUTS = {
    "DP2 with dropout": ("model", 2, {}),
    "PP2 in two chunks": (
        "model",
        2,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "bf16": True},
    ),
    "biases of experts that move": (
        "deepseek-mtp",
        2,
        {"expert_model_parallel_size": 2, "moe_router_bias_update_rate": 0.01, "overlap_grad_reduce": True},
    ),
}


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("preflight")
    ranks(1, make_model, folder / "model", 0.1)
    ranks(1, make_sources, folder, ["deepseek-mtp"], "float32")
    make_store(folder / "store", rows=12)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_is_the_same_with_and_without(ranks, folder, layout):
    model, world_size, options = LAYOUTS[layout]
    outs = [folder / f"{layout} {preflight}" for preflight in (False, True)]
    plain, tried = (
        ranks(
            world_size, train, f"{folder}/{model}", f"{folder}/store", str(out), {**OPTIONS, **options, "preflight": p}
        )
        for p, out in zip((False, True), outs, strict=True)
    )
    assert (history(plain) == history(tried)).all()
    assert ranks(1, same_weights, *(out / "final" for out in outs)) == [True]
    assert plain[0]["result"]["preflight"] is None
    assert len(tried[0]["result"]["preflight"]["peak_memory_mb"]) == world_size
    assert not list(outs[1].glob(".staging-*"))


def train_with_small_files(model: str, store: str, out: str, options: dict[str, Any]) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    train(model, store, out, options)


def test_a_disk_that_does_not_take_a_checkpoint_is_found_before_the_first_step(ranks, folder):
    out = folder / "no room"
    (out / ".staging-of-a-killed-run").mkdir(parents=True)
    with pytest.raises(RankError, match=r"(Resource|Checkpoint)Error: preflight: .*no room"):
        ranks(1, train_with_small_files, f"{folder}/model", f"{folder}/store", str(out), {**OPTIONS, "preflight": True})
    assert not list(out.glob("checkpoint-*"))
    assert not list(out.glob(".staging-*")), "what a killed run left takes no room"


def break_model(model: Path, broken: Path) -> None:
    """Finite weights whose products are not."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model)
    network.model.layers[1].mlp.down_proj.weight.data.fill_(3e38)
    network.save_pretrained(broken)


def test_a_loss_that_is_not_finite_is_found_before_the_first_step(ranks, folder):
    ranks(1, break_model, folder / "model", folder / "broken")
    with pytest.raises(RankError, match=r"ConfigError: preflight: loss .* is not finite, before any step"):
        ranks(2, train, f"{folder}/broken", f"{folder}/store", f"{folder}/infinite", {**OPTIONS, "preflight": True})
