"""Preference optimization equals a plain torch loop over two models, at every layout and with every loss."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from transformers import TrainerCallback

from tests.mca_lib.checkpoint.expert_ranks import make_sources
from tests.mca_lib.trainers.preference_training import (
    MEASURES,
    history,
    make_pair_store,
    make_trainer,
    plain_training,
    train,
)
from tests.mca_lib.trainers.training import in_buckets, make_model, make_store, weights
from tests.ranks import RankError

STEPS = 10
LAYOUTS = {
    "one rank": (1, {}),
    "DP2": (2, {}),
    "TP2 with sequence parallelism": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "PP2 in two chunks": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "CP2": (2, {"context_parallel_size": 2}),
    "CP2 with a micro batch of 2": (2, {"context_parallel_size": 2, "per_device_train_batch_size": 2}),
    "micro batch of 4": (1, {"per_device_train_batch_size": 4}),
    "full recomputation": (1, {"recompute_granularity": "full"}),
}


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dpo")
    # Dropout in the model's config: both models must do without.
    ranks(1, make_model, folder / "model", 0.1)
    make_pair_store(folder / "packed", rows=18)  # 4 steps of 4 and one of 2 rows per epoch
    make_pair_store(folder / "packed", rows=5, split="eval", seed=9)
    make_pair_store(folder / "unpacked", rows=9, packed=False)
    return folder


@pytest.fixture(scope="module")
def plain(ranks, folder) -> np.ndarray:
    return np.array(ranks(1, plain_training, f"{folder}/model", f"{folder}/packed", STEPS, {})[0])


def compare(found: np.ndarray, plain: np.ndarray) -> None:
    for name, ours, theirs in zip(MEASURES, found.T, plain.T, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("PP2", "CP2")])
def test_curves_equal_plain_torch_and_begin_at_ln_2(ranks, folder, plain, layout):
    world_size, options = LAYOUTS[layout]
    options = {"max_steps": STEPS, **options}
    values = ranks(world_size, train, f"{folder}/model", f"{folder}/packed", f"{folder}/{layout}", options, {})
    compare(history(values), plain)
    first = values[0]["log"][0]
    assert np.float32(first["loss"]) == np.float32(math.log(2)), "exactly: the policy is the reference"
    assert (first["rewards/margins"], first["rewards/chosen"], first["rewards/accuracies"]) == (0.0, 0.0, 0.0)


def test_the_run_learns(plain):
    assert plain[-1, 0] < 0.9 * math.log(2)
    assert plain[-1, 2] > plain[1, 2] >= 0


@pytest.mark.parametrize(("layout", "micro"), [("PP2", 1), ("CP2", 2)])
def test_rows_of_one_pair_are_trained_as_well(ranks, folder, layout, micro):
    plain = np.array(ranks(1, plain_training, f"{folder}/model", f"{folder}/unpacked", 6, {})[0])
    world_size, options = LAYOUTS[layout]
    options = {"max_steps": 6, **options, "per_device_train_batch_size": micro}
    out = f"{folder}/unpacked {layout} {micro}"
    compare(history(ranks(world_size, train, f"{folder}/model", f"{folder}/unpacked", out, options, {})), plain)


@pytest.mark.parametrize(
    "preference",
    [{"pref_loss": "hinge"}, {"pref_loss": "ipo"}, {"pref_loss": "simpo"}, {"pref_loss": "orpo"}, {"pref_ftx": 0.5}],
    ids=str,
)
def test_every_loss_equals_plain_torch_with_documents_split_over_two_ranks(ranks, folder, preference):
    plain = np.array(ranks(1, plain_training, f"{folder}/model", f"{folder}/packed", 5, preference)[0])
    options = {"max_steps": 5, "context_parallel_size": 2}
    values = ranks(2, train, f"{folder}/model", f"{folder}/packed", f"{folder}/{preference}", options, preference)
    compare(history(values), plain)
    assert (folder / str(preference) / "reference").exists() == (preference.get("pref_loss") not in ("orpo", "simpo"))


def evaluate(model: str, store: str, out: str, options: dict) -> tuple[dict, int]:
    trainer = make_trainer(model, store, out, options, {"pref_loss": "orpo"})
    metrics = trainer.evaluate()
    return metrics.means, metrics.count


def test_evaluation_covers_every_held_out_pair_once_at_every_layout(ranks, folder):
    found = {
        layout: ranks(LAYOUTS[layout][0], evaluate, f"{folder}/model", f"{folder}/packed", f"{folder}/e", options)[0]
        for layout, options in (
            ("one rank", {"per_device_eval_batch_size": 2}),
            ("DP2", {"per_device_eval_batch_size": 2}),
            ("PP2 in two chunks", LAYOUTS["PP2 in two chunks"][1]),
            ("CP2", LAYOUTS["CP2"][1]),
        )
    }
    from mca_lib.data.token_store import TokenStore

    pairs = TokenStore.open(folder / "packed" / "eval").num_documents // 2
    means, _ = found["one rank"]
    for layout, (others, count) in found.items():
        assert count == pairs, layout
        assert others == pytest.approx(means, rel=1e-4), layout


def test_bf16_begins_at_ln_2_too(ranks, folder):
    options = {"max_steps": 3, "bf16": True, "logging_steps": 1}
    values = ranks(2, train, f"{folder}/model", f"{folder}/packed", f"{folder}/bf16", options, {})
    losses = [line["loss"] for line in values[0]["log"]]
    assert np.float32(losses[0]) == np.float32(math.log(2))
    assert losses[2] != losses[0]


class EnoughMargin(TrainerCallback):
    """Ends the training by what was measured on the held-out pairs."""

    def on_evaluate(self, args, state, control, metrics, **_) -> None:
        control.should_training_stop = state.global_step == 2 and math.isfinite(metrics["eval_rewards/margins"])


def test_the_log_the_result_and_callbacks_have_the_measures(ranks, folder):
    options = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 1}
    out, places = folder / "named", (f"{folder}/model", f"{folder}/packed")
    result = ranks(1, train, *places, str(out), options, {}, [EnoughMargin])[0]["result"]
    lines = [json.loads(line) for line in (out / "training_log.jsonl").read_text().splitlines()]
    held_out = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in held_out] == [1, 2]
    assert set(result["eval_measures"]) == {name for name in MEASURES if "/" in name} | {"rewards/rejected"}
    assert held_out[-1]["eval_rewards/margins"] == result["eval_measures"]["rewards/margins"]
    assert result["trained_tokens"] > 0


def test_rows_that_are_no_pairs_are_refused(ranks, folder):
    make_store(folder / "texts", rows=6)
    with pytest.raises(RankError, match=r"DataError: token store .*: row \d has an odd number of documents"):
        ranks(1, train, f"{folder}/model", f"{folder}/texts", f"{folder}/refused", {"max_steps": 1}, {})


def refusal(config: dict) -> str | None:
    from types import SimpleNamespace

    from mca_lib.errors import ConfigError
    from mca_lib.trainers.dpo_trainer import _refuse_token_losses

    fields = dict.fromkeys(("num_moe_experts", "moe_aux_loss_coeff", "moe_z_loss_coeff")) | config
    try:
        _refuse_token_losses(SimpleNamespace(config=SimpleNamespace(**fields)))
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, None),
        ({"num_moe_experts": 4}, None),
        ({"num_moe_experts": 4, "moe_aux_loss_coeff": 0.01}, "losses of routers"),
        ({"num_moe_experts": 4, "moe_z_loss_coeff": 0.01}, "losses of routers"),
    ],
)
def test_losses_that_megatron_divides_by_the_same_count_are_refused(ranks, config, named):
    (found,) = ranks(1, refusal, config)
    assert (found is None) if named is None else named in found


def save_as_is(model: str, out: str) -> None:
    from mca_lib.models import AutoModel
    from mca_lib.parallel import DistributingParallelArguments, initialize_model_parallel

    initialize_model_parallel(DistributingParallelArguments())
    AutoModel.from_pretrained(model).save_pretrained(out)


def test_prediction_layers_stay_as_they_are_and_the_others_train_as_plain_torch(ranks, folder, tmp_path):
    """Where the last stage has a copy of the embedding that gets no gradient, and experts beside."""
    ranks(1, make_sources, tmp_path, ["glm4-moe"], "float32")
    places, steps = (f"{tmp_path}/glm4-moe", f"{folder}/packed"), 3
    plain = np.array(ranks(1, plain_training, *places, steps, {})[0])
    options = {"max_steps": steps, "overlap_grad_reduce": True, "overlap_param_gather": True}
    options |= {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}
    compare(history(ranks(4, in_buckets, train, *places, str(tmp_path / "out"), options, {})), plain)
    ranks(1, save_as_is, places[0], str(tmp_path / "source"))
    source, trained = weights(tmp_path / "source"), weights(tmp_path / "out" / "final")
    assert source.keys() == trained.keys()
    same = {name for name, weight in source.items() if weight.equal(trained[name])}
    prediction = {name for name in source if name.startswith("mtp.")}
    assert prediction
    assert same >= prediction
    assert {name.rpartition(".")[2] for name in same - prediction} <= {"expert_bias"}  # no gradient trains these
