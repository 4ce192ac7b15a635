"""The LLaMA-Factory backend trains what Megatron-Core trains: the same rows, losses and gradient norms."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.mca_lib.trainers.preference_training import make_pair_store
from tests.mca_lib.trainers.training import HYPERPARAMETERS, make_store

STEPS = 6
# fp32; sums are taken in another order.
TOLERANCE = 1e-4


def make_small_model(directory: Path) -> Path:
    """With its tokenizer, which LLaMA-Factory wants to see. Its padding token, 0, is one of the stores' text."""
    from safetensors.torch import load_file, save_file

    from mca_lib.tiny_models import make_tiny_model

    shape = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "initializer_range": 0.1}
    make_tiny_model(directory, "llama", **shape)
    weights = load_file(directory / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding[0] = embedding[1].flip(0)  # transformers begins with 0 there, of which a norm has no gradient
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def run(folder: str, name: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """One rank of `run_train`; the lines of its log."""
    from mca_lib.run_train import main
    from mca_lib.trainers.progress import read_log

    out = Path(folder, name)
    out.mkdir(exist_ok=True)
    arguments = HYPERPARAMETERS | {"output_dir": str(out), "max_steps": STEPS, "save_strategy": "no"} | options
    arguments["save_steps"] = max(1, arguments["save_steps"])
    file = out / "arguments.json"
    file.write_text(json.dumps(arguments))
    main([str(file)])
    return read_log(out)


def history(lines: list[dict[str, Any]], names: tuple[str, ...] = ("loss", "grad_norm", "learning_rate")) -> np.ndarray:
    return np.array([[line[name] for name in names] for line in lines if "loss" in line])


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama_factory")
    ranks(1, make_small_model, folder / "model")
    for split, rows in (("train", 11), ("eval", 3)):  # an epoch is two steps of 4 and one of 3 rows
        make_store(folder / "store", rows, split=split)
        make_pair_store(folder / "pairs", rows, split=split)
    return folder


def options(folder: Path, stage: str, **changes: Any) -> dict[str, Any]:
    store = folder / ("pairs" if stage == "dpo" else "store")
    model = str(folder / "model")
    return {"model_name_or_path": model, "token_store": str(store), "stage": stage, "do_eval": True} | changes


@pytest.mark.parametrize(("stage", "world_size"), [("sft", 1), ("dpo", 2)])
def test_the_curves_are_those_of_megatron_core(ranks, folder, stage, world_size):
    wanted = options(folder, stage)
    ours, *_ = ranks(world_size, run, str(folder), f"mca {stage}", wanted)
    theirs, *_ = ranks(world_size, run, str(folder), f"llama-factory {stage}", wanted | {"use_mca": False})
    np.testing.assert_allclose(history(theirs), history(ours), rtol=TOLERANCE)
    assert theirs[-1]["eval_loss"] == pytest.approx(ours[-1]["eval_loss"], rel=TOLERANCE)
