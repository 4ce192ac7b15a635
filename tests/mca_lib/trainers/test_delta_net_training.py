"""A model with gated delta nets trains as plain torch does, at every layout, and goes on after a kill at another one.

Rows are packed, and plain torch takes one document at a time: a state that went on into the next would show.
"""

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.mca_lib.checkpoint.expert_ranks import make_sources
from tests.mca_lib.trainers import preference_training
from tests.mca_lib.trainers.training import (
    history,
    kill_in_step,
    make_store,
    plain_training,
    train,
    train_in_buckets,
)
from tests.ranks import RankError

STEPS = 4
# Relative, fp32; sums are taken in another order.
TOLERANCE = 1e-4

TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = {
    "one rank, micro batch of 2": (1, {"per_device_train_batch_size": 2}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "CP2": (2, {"context_parallel_size": 2}),
    "DP2 with overlap": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "full recomputation": (1, {"recompute_granularity": "full"}),
}


@pytest.fixture(scope="module")
def folder(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("delta nets")
    ranks(1, make_sources, folder, ["qwen3.5"], "float32")
    make_store(folder / "store", rows=18)
    return folder


@pytest.fixture(scope="module")
def plain(ranks: Any, folder: Path) -> np.ndarray:
    """Losses and gradient norms by transformers and torch alone."""
    return np.array(ranks(1, plain_training, f"{folder}/qwen3.5", f"{folder}/store", STEPS)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_plain_torch(ranks: Any, folder: Path, plain: np.ndarray, layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    places = f"{folder}/qwen3.5", f"{folder}/store", f"{folder}/{layout}"
    function = train_in_buckets if "overlap" in layout else train
    values = ranks(world_size, function, *places, {"max_steps": STEPS, **options})
    np.testing.assert_allclose(history(values), plain, rtol=TOLERANCE)


def train_until_killed(model: str, store: str, out: str, options: dict[str, Any]) -> None:
    kill_in_step(3, signal.SIGKILL)
    train(model, store, out, options)


def test_a_killed_run_goes_on_at_another_layout(ranks: Any, folder: Path, plain: np.ndarray, tmp_path: Path) -> None:
    """Masters and moments of the projections that are packed in one are split and joined with it."""
    places, options = (f"{folder}/qwen3.5", f"{folder}/store"), {"max_steps": STEPS, "save_steps": 2}
    with pytest.raises(RankError, match="exit -9"):
        ranks(2, train_until_killed, *places, str(tmp_path / "killed"), {**options, **TENSOR})
    for name, world_size, layout in (("CP2", 2, {"context_parallel_size": 2}), ("alone", 1, {})):
        shutil.copytree(tmp_path / "killed", tmp_path / name)
        values = ranks(world_size, train, *places, str(tmp_path / name), {**options, **layout})
        np.testing.assert_allclose(history(values), plain, rtol=TOLERANCE)


def test_preferences_train_as_plain_torch(ranks: Any, folder: Path) -> None:
    """Chosen and rejected are documents of one row, whose states must not meet."""
    pairs, steps = preference_training.make_pair_store(folder / "pairs", rows=8), 3
    model = f"{folder}/qwen3.5"
    plain = np.array(ranks(1, preference_training.plain_training, model, str(pairs), steps, {})[0])
    options = {"max_steps": steps, "context_parallel_size": 2}
    values = ranks(2, preference_training.train, model, str(pairs), f"{folder}/preferences", options, {})
    losses_and_norms = preference_training.history(values)[:, :2]
    np.testing.assert_allclose(losses_and_norms, plain[:, :2], rtol=2 * TOLERANCE)
