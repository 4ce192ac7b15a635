"""A hybrid goes on from a transformer's training: weights, fp32 masters, moments, step and place in the data.

All layouts, dense and with experts: `python -m tests.acceptance.gpt_to_hybrid`.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from mca_lib.checkpoint.sealed import find_damage
from mca_lib.models.config import McaModelConfig
from tests.mca_lib.checkpoint import fsdp_ranks, source_training
from tests.mca_lib.checkpoint.source_training import DENSE, EXPERTS, FRESH, MAMBA, OPTIONS, SAVED, STEPS, differences
from tests.mca_lib.tiny_models import save_hf
from tests.mca_lib.trainers.training import history, read_json, stored_tensors, train

TOLERANCE = 1e-6
"""Of a loss of about 4, relative, at another layout than the transformer's: some roundings in fp32."""

ROWS = {
    "one rank": ("dense", (1, {}), (1, {})),
    "TP2 to PP2 in two chunks": (
        "dense",
        (2, {"tensor_model_parallel_size": 2}),
        (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    ),
    "DP2 bf16 to CP2 bf16": ("dense", (2, {"bf16": True}), (2, {"bf16": True, "context_parallel_size": 2})),
    "experts, one rank to TP2 EP2": (
        "experts",
        (1, {}),
        (4, {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}),
    ),
}
"""Name → model, and layout of the transformer's training and of the hybrid's."""


@pytest.mark.parametrize("row", ROWS)
def test_the_hybrid_goes_on_as_the_transformer_would(ranks, source_folder, tmp_path, row):
    model, (before, saved), (after, options) = ROWS[row]
    pattern = EXPERTS if model == "experts" else DENSE
    places = f"{source_folder}/{model}", f"{source_folder}/store"
    straight = history(ranks(before, train, *places, f"{tmp_path}/transformer", {**OPTIONS, **saved}))[SAVED:]
    source = tmp_path / "transformer" / f"checkpoint-{SAVED}"
    options = {**OPTIONS, **options, "hybrid_layer_pattern": pattern, "load_checkpoint": str(source)}

    went_on = history(ranks(after, train, *places, f"{tmp_path}/hybrid", options))
    if row == "one rank":
        assert (went_on == straight).all(), "the same bits"
    # bf16 rounds the partial results of another layout to 8 bits.
    limit = 2e-2 if options.get("bf16") else TOLERANCE
    np.testing.assert_allclose(went_on, straight, rtol=limit)

    placed = ranks(after, source_training.load_and_save, places[0], f"{tmp_path}/loaded", options)
    assert {place["step"] for place in placed} == {SAVED}
    assert set().union(*(place["adam"] for place in placed)) == {SAVED}
    found = differences(tmp_path / "loaded" / f"checkpoint-{SAVED}", source, pattern)
    assert found.differing == []
    assert found.fresh == {}
    assert find_damage(source) is None, "nothing is written to the source"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fresh_layers_are_alive(ranks, source_folder, tmp_path, precision):
    """Their masters are the initialization, not zeros, and the first step changes them."""
    from mca_lib.models.hybrid.fresh import fresh_tensors

    places = f"{source_folder}/dense", f"{source_folder}/store"
    cast = {"bf16": precision == "bf16"}
    ranks(1, train, *places, f"{tmp_path}/transformer", {**OPTIONS, **cast})
    source = tmp_path / "transformer" / f"checkpoint-{SAVED}"
    options = {**OPTIONS, **cast, **MAMBA, "hybrid_layer_pattern": FRESH, "load_checkpoint": str(source)}
    options |= {"fresh_seed": 7, "max_steps": SAVED + 1, "finetune": False}

    ranks(1, source_training.load_and_save, places[0], f"{tmp_path}/loaded", options)
    found = differences(tmp_path / "loaded" / f"checkpoint-{SAVED}", source, FRESH)
    assert found.differing == []
    drawn = {name: value for layer in (0, 5) for name, value in fresh_tensors(_hybrid(source_folder), layer, seed=7)}
    masters = source_training.whole(found.fresh, "optimizer.state.param.")
    assert masters.keys() == drawn.keys()
    for name, value in drawn.items():
        # A bf16 model is made in bf16, and its masters of it.
        expected = value if precision == "fp32" else value.bfloat16().float()
        assert torch.equal(masters[name], expected), name
    assert not any(value.any() for key, value in found.fresh.items() if ".exp_avg" in key)

    options |= {"max_steps": STEPS, "save_steps": 1}
    ranks(1, train, *places, f"{tmp_path}/hybrid", options)
    after = differences(tmp_path / "hybrid" / f"checkpoint-{SAVED + 1}", source, FRESH)
    for name, value in source_training.whole(after.fresh, "optimizer.state.param.").items():
        assert not torch.equal(value, masters[name]), f"{name} has not moved"


def test_zero_output_starts_as_the_transformer(ranks, source_folder, transformer, tmp_path):
    options = {**OPTIONS, **MAMBA, "hybrid_layer_pattern": FRESH, "load_checkpoint": str(transformer.checkpoint)}
    options |= {"fresh_layers": "zero_output", "tensor_model_parallel_size": 2}
    went_on = history(
        ranks(2, train, f"{source_folder}/dense", f"{source_folder}/store", f"{tmp_path}/hybrid", options)
    )
    np.testing.assert_allclose(went_on[0, 0], transformer.steps[0, 0], rtol=TOLERANCE)
    assert abs(went_on[1, 0] - transformer.steps[1, 0]) > 100 * TOLERANCE, "its layers learn"


@pytest.mark.parametrize(
    ("options", "step", "adam", "rate"),
    [
        ({}, SAVED, {SAVED}, 3.75e-3),  # the cosine, a third of the way down
        ({"finetune": True, "learning_rate": 1e-3}, 0, {SAVED}, 0.0),  # a warm-up begins
        ({"no_load_optim": True}, SAVED, {None}, 3.75e-3),
    ],
    ids=["resumed", "finetune", "weights alone"],
)
def test_what_is_gone_on_with(ranks, source_folder, transformer, tmp_path, options, step, adam, rate):
    options = {**OPTIONS, **options, "hybrid_layer_pattern": DENSE, "load_checkpoint": str(transformer.checkpoint)}
    ((place),) = ranks(1, source_training.load_and_save, f"{source_folder}/dense", f"{tmp_path}/loaded", options)
    assert place == {"step": step, "adam": adam, "rate": pytest.approx(rate), "skipped": 0}
    found = differences(tmp_path / "loaded" / f"checkpoint-{SAVED}", transformer.checkpoint, DENSE)
    moments = [key for key in found.differing if ".exp_avg" in key]
    assert found.differing == moments, "weights and masters are the transformer's"
    assert bool(moments) == ("no_load_optim" in options)


def test_replicas_of_another_precision_agree(ranks, source_folder, tmp_path):
    """In fp32 a rank's masters are its share of the weights; the rest it has read is the checkpoint's bf16."""
    places = f"{source_folder}/dense", f"{source_folder}/store"
    ranks(1, train, *places, f"{tmp_path}/transformer", {**OPTIONS, "max_steps": SAVED, "bf16": True})
    source = tmp_path / "transformer" / f"checkpoint-{SAVED}"
    options = {**OPTIONS, "hybrid_layer_pattern": DENSE, "load_checkpoint": str(source), "finetune": True}
    ranks(2, source_training.load_and_save, places[0], f"{tmp_path}/loaded", options)
    stored = stored_tensors(tmp_path / "loaded" / f"checkpoint-{SAVED}" / "state")
    masters = {key for key in stored if key.startswith("optimizer.state.param.")}
    assert len(masters) == 26
    for key in masters:
        assert torch.equal(stored[key], stored[key.removeprefix("optimizer.state.param.")]), key


def test_a_hybrid_run_resumes_its_own_checkpoints(ranks, source_folder, transformer, tmp_path):
    """Once it has one, `load_checkpoint` is not read again; and a transformer's is no checkpoint of a hybrid run."""
    places = f"{source_folder}/dense", f"{source_folder}/store"
    options = {
        **OPTIONS,
        "save_steps": 1,
        "hybrid_layer_pattern": DENSE,
        "load_checkpoint": str(transformer.checkpoint),
    }
    ranks(1, train, *places, f"{tmp_path}/hybrid", {**options, "save_total_limit": 2})
    for name in ("train_result.json", "final", f"checkpoint-{STEPS}"):
        (tmp_path / "hybrid" / name).rename(tmp_path / name)
    again = ranks(1, train, *places, f"{tmp_path}/hybrid", options)
    assert [line["step"] for line in again[0]["log"]] == [SAVED + 1, STEPS]
    assert (history(again) == transformer.steps).all()
    assert read_json(tmp_path / "hybrid" / "train_result.json")["steps"] == STEPS


def test_use_legacy_model_goes_on_as_the_transformer(ranks, source_folder, transformer, tmp_path):
    options = {
        **OPTIONS,
        "hybrid_layer_pattern": FRESH,
        "use_legacy_model": True,
        "load_checkpoint": str(transformer.checkpoint),
    }
    values = ranks(1, train, f"{source_folder}/dense", f"{source_folder}/store", f"{tmp_path}/legacy", options)
    assert (history(values) == transformer.steps).all()
    assert McaModelConfig.from_pretrained(tmp_path / "legacy" / "final").hybrid is None


def test_a_directory_of_megatron_lm(ranks, source_folder, transformer, tmp_path):
    """Found by its tracker; its iteration and optimizer are gone on with."""
    options = {**OPTIONS, "use_legacy_model": True, "load_checkpoint": str(transformer.checkpoint)}
    ranks(1, source_training.save_as_megatron_lm, f"{source_folder}/dense", f"{tmp_path}/megatron", options)
    options = {**OPTIONS, "hybrid_layer_pattern": DENSE, "load_checkpoint": f"{tmp_path}/megatron"}
    values = ranks(1, train, f"{source_folder}/dense", f"{source_folder}/store", f"{tmp_path}/hybrid", options)
    assert (history(values) == transformer.steps).all()


def test_a_directory_of_megatron_fsdp(ranks, source_folder, tmp_path):
    """As it; `test_fsdp_load.py` compares tensors and steps."""
    ranks(1, save_hf, tmp_path / "llama", "llama", "bfloat16")
    written = tmp_path / "megatron" / f"iter_{SAVED:07d}"
    ranks(2, fsdp_ranks.run, "write", {}, tmp_path / "llama", written)
    (written.parent / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    options = {**OPTIONS, "bf16": True, "hybrid_layer_pattern": DENSE, "load_checkpoint": str(written.parent)}
    places = str(tmp_path / "llama"), f"{source_folder}/store", f"{tmp_path}/hybrid"
    (trained,) = ranks(1, train, *places, {**options, "save_steps": 1})
    assert [line["step"] for line in trained["log"]] == [SAVED + 1, STEPS]
    states = stored_tensors(tmp_path / "hybrid" / f"checkpoint-{SAVED + 1}" / "state")
    assert states["optimizer.state.exp_avg.embedding.word_embeddings.weight"].any()


def _hybrid(source_folder: Path) -> McaModelConfig:
    from mca_lib.models.hybrid.sizes import hybrid_layers

    config = McaModelConfig.from_pretrained(source_folder / "dense")
    return config.with_hybrid(
        hybrid_layers(FRESH, config.hidden_size, {name.removeprefix("mamba_"): size for name, size in MAMBA.items()})
    )
