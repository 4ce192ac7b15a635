"""Models that see images train as plain torch does, whoever encodes the images, and keep what is frozen bit by bit."""

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mca_lib.data.token_store import TokenStoreWriter
from tests.mca_lib.trainers import preference_training
from tests.mca_lib.trainers.training import history, kill_in_step, plain_training, train, train_in_buckets
from tests.mca_lib.trainers.vision_training import (
    MODEL,
    STORE,
    adapter_equals_merged,
    answers,
    changed_by_training,
    evaluated,
    make_vision,
)
from tests.ranks import RankError

STEPS = 3
# fp32; sums are taken in another order. Losses are of order 6.
TOLERANCE = 1e-4

LAYOUTS = {
    "one rank, micro batch of 2": (1, {"per_device_train_batch_size": 2}),
    "TP2 with sequence parallel": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "CP2, recomputed": (2, {"context_parallel_size": 2, "recompute_granularity": "full"}),
    # Replicas reduce buckets as they fill, those of the tower in micro batches without images too.
    "DP2 with overlap": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
}


@pytest.fixture(scope="module")
def folder(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    ranks(1, make_vision, folder, "qwen3_vl")
    return folder


@pytest.fixture(scope="module")
def plain(ranks: Any, folder: Path) -> np.ndarray:
    """Losses and gradient norms by transformers and torch alone."""
    return np.array(ranks(1, plain_training, f"{folder}/{MODEL}", f"{folder}/{STORE}", STEPS)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_plain_torch(ranks: Any, folder: Path, plain: np.ndarray, layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    places = f"{folder}/{MODEL}", f"{folder}/{STORE}", f"{folder}/{layout}"
    function = train_in_buckets if "overlap" in layout else train
    values = ranks(world_size, function, *places, {"max_steps": STEPS, **options})
    np.testing.assert_allclose(history(values), plain, rtol=0, atol=TOLERANCE)


def train_until_killed(model: str, store: str, out: str, options: dict[str, Any]) -> None:
    kill_in_step(3, signal.SIGKILL)
    train(model, store, out, options)


def test_a_killed_run_goes_on_at_another_layout(ranks: Any, folder: Path, plain: np.ndarray, tmp_path: Path) -> None:
    places, options = (f"{folder}/{MODEL}", f"{folder}/{STORE}", str(tmp_path)), {"max_steps": STEPS, "save_steps": 2}
    with pytest.raises(RankError, match="exit -9"):
        ranks(2, train_until_killed, *places, {**options, "context_parallel_size": 2})
    values = ranks(2, train, *places, {**options, "tensor_model_parallel_size": 2})
    np.testing.assert_allclose(history(values), plain, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({}, "model.language_model., lm_head."),
        ({"freeze_multi_modal_projector": False}, "model.visual.merger., model.language_model., lm_head."),
        ({"freeze_vision_tower": False, "freeze_language_model": True}, "model.visual."),
    ],
    ids=["language model", "with projector", "tower alone"],
)
def test_what_is_frozen_stays_bit_by_bit(
    ranks: Any, folder: Path, tmp_path: Path, options: dict[str, Any], trained: str
) -> None:
    changed = ranks(1, changed_by_training, folder, tmp_path / "out", options)[0]
    allowed = trained.split(", ")
    assert {name for name in changed if not any(name.startswith(part) for part in allowed)} == set()
    assert all(any(name.startswith(part) for name in changed) for part in allowed)
    assert ("model.visual.merger.norm.weight" in changed) == ("freeze_multi_modal_projector" in options)


def test_preferences_of_text_are_trained_as_plain_torch(ranks: Any, folder: Path, tmp_path: Path) -> None:
    """No micro batch has images then, and the tower gets gradients of 0."""
    random = np.random.default_rng(0)
    with TokenStoreWriter(tmp_path / "train") as writer:
        for _ in range(8):
            # transformers gives the embedding of token 0, its padding, no gradient.
            writer.add_row([(tokens + 3, mask) for tokens, mask in preference_training.make_pair(random)])
    places = f"{folder}/{MODEL}", str(tmp_path)
    expected = ranks(1, preference_training.plain_training, *places, 2, {})[0]
    options = {"max_steps": 2, "tensor_model_parallel_size": 2}
    values = ranks(2, preference_training.train, *places, str(tmp_path / "out"), options, {})
    np.testing.assert_allclose(preference_training.history(values), expected, rtol=0, atol=TOLERANCE)


def test_the_exported_model_answers_in_transformers(ranks: Any, folder: Path, tmp_path: Path) -> None:
    """With its own tokenizer, template and image processor, which came along."""
    options = {"max_steps": 60, "global_batch_size": 8, "freeze_vision_tower": False}
    ranks(1, changed_by_training, folder, tmp_path / "out", options)
    assert ranks(1, answers, folder, tmp_path / "out" / "export")[0].startswith(("red", "green", "blue", "yellow"))


def test_adapters_are_the_same_in_peft_and_merged(ranks: Any, tmp_path: Path) -> None:
    """Of a model whose tower has modules of the same names as the language model's, and weights as transformers 4."""
    ranks(1, make_vision, tmp_path, "qwen2_5_vl", 12)
    difference, unknown = ranks(1, adapter_equals_merged, tmp_path, tmp_path / "out")[0]
    assert difference <= 1e-5
    assert unknown == 0


def test_held_out_rows_with_images_are_evaluated(ranks: Any, folder: Path, tmp_path: Path) -> None:
    """By transformers, to the loss that the trainer has on Megatron."""
    metrics, loss, samples = ranks(1, evaluated, folder, tmp_path / "out")[0]
    assert abs(metrics["models"]["trained"]["loss"] - loss) <= 1e-4
    assert metrics["models"]["base"]["loss"] > loss
    assert any("<image>" in sample["prompt"] and "<|image_pad|>" not in sample["prompt"] for sample in samples)
