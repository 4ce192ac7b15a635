"""The parallel layout, the micro batch size and packing decide speed and memory, never loss or gradient."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.mca_lib.checkpoint.expert_ranks import make_sources
from tests.mca_lib.trainers.training import (
    history,
    make_model,
    make_store,
    plain_training,
    train,
    train_in_buckets,
    weights,
)
from tests.ranks import RankError

STEPS = 12
# fp32; sums are taken in another order.
TOLERANCE = 1e-4

LAYOUTS = {
    "one rank": (1, {}),
    "DP2": (2, {}),
    "DP2 without the distributed optimizer": (2, {"use_distributed_optimizer": False}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "TP2 with sequence parallelism": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "PP2 in two chunks": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "PP2 uneven": (2, {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1}),
    "PP2 in two chunks by a layout": (
        2,
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": "E|t*2|t|tL",
        },
    ),
    "CP2": (2, {"context_parallel_size": 2}),
    "micro batch of 2": (1, {"per_device_train_batch_size": 2}),
    "micro batch of 4": (1, {"per_device_train_batch_size": 4}),
    "TP2 PP2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "full recomputation": (1, {"recompute_granularity": "full"}),
    "selective recomputation": (1, {"recompute_granularity": "selective"}),
}


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    ranks(1, make_model, folder / "model")
    make_store(folder / "store", rows=18)  # 4 steps of 4 and one of 2 rows per epoch
    return folder


@pytest.fixture(scope="module")
def plain(ranks, folder) -> np.ndarray:
    return np.array(ranks(1, plain_training, f"{folder}/model", f"{folder}/store", STEPS)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradient_norms_equal_plain_torch(ranks, folder, plain, layout):
    world_size, options = LAYOUTS[layout]
    options = {"max_steps": STEPS, **options}
    values = ranks(world_size, train, f"{folder}/model", f"{folder}/store", f"{folder}/{layout}", options)
    np.testing.assert_allclose(history(values), plain, rtol=0, atol=TOLERANCE)


GRADIENTS = {"overlap_grad_reduce": True}
GRADIENTS_AND_WEIGHTS = {**GRADIENTS, "overlap_param_gather": True}
OVERLAPS = {
    "DP2 gradients": (2, {**GRADIENTS, "use_distributed_optimizer": False}),
    "DP2": (2, GRADIENTS_AND_WEIGHTS),
    "DP2 PP2": (4, {**GRADIENTS_AND_WEIGHTS, **LAYOUTS["PP2"][1]}),
    "DP2 PP2 in two chunks": (4, {**GRADIENTS_AND_WEIGHTS, **LAYOUTS["PP2 in two chunks"][1]}),
}


@pytest.mark.parametrize("layout", OVERLAPS)
def test_overlap_changes_nothing(ranks, folder, layout):
    """Neither steps, nor evaluations between them, nor the weights at the end."""
    world_size, overlap = OVERLAPS[layout]
    make_store(folder / "held", rows=10)
    make_store(folder / "held", rows=3, split="eval", seed=9)
    options = {**overlap, "max_steps": 5, "eval_strategy": "steps", "eval_steps": 2}
    plain = {**options, **dict.fromkeys(GRADIENTS_AND_WEIGHTS, False)}
    runs = []
    for name, function, chosen in (("with", train_in_buckets, options), ("without", train, plain)):
        out = folder / f"{layout} {name} overlap"
        values = ranks(world_size, function, f"{folder}/model", f"{folder}/held", str(out), chosen)
        log = [json.loads(line) for line in (out / "training_log.jsonl").read_text().splitlines()]
        evaluations = [line["eval_loss"] for line in log if "eval_loss" in line]
        runs.append((history(values), evaluations, weights(out / "final")))
    (steps, evaluations, trained), (plain_steps, plain_evaluations, plain_trained) = runs
    # The norm of the gradients is summed in the order of the buffers; the clipped gradients differ by a rounding.
    np.testing.assert_allclose(steps, plain_steps, rtol=1e-6)
    assert len(evaluations) == 3
    np.testing.assert_allclose(evaluations, plain_evaluations, rtol=1e-6)
    for name, weight in trained.items():
        np.testing.assert_allclose(weight, plain_trained[name], rtol=0, atol=1e-5, err_msg=name)


def test_the_run_learns(plain):
    assert plain[-1, 0] < 0.8 * plain[0, 0]


@pytest.fixture(scope="module")
def plain_tied(ranks, folder) -> np.ndarray:
    """A vocabulary that tensor parallelism has to pad, and one matrix for embedding and output."""
    ranks(1, make_model, folder / "tied", 0.0, True, 131)
    return np.array(ranks(1, plain_training, f"{folder}/tied", f"{folder}/store", STEPS)[0])


TIED = {name: LAYOUTS[name] for name in ("TP2", "PP2 in two chunks")} | {"DP2 with overlap": OVERLAPS["DP2"]}


@pytest.mark.parametrize("layout", TIED)
def test_the_same_with_tied_embeddings_and_a_padded_vocabulary(ranks, folder, plain_tied, layout):
    world_size, options = TIED[layout]
    function, options = train_in_buckets if "overlap" in layout else train, {"max_steps": STEPS, **options}
    values = ranks(world_size, function, f"{folder}/tied", f"{folder}/store", f"{folder}/tied {layout}", options)
    np.testing.assert_allclose(history(values), plain_tied, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layout", ["DP2", "CP2"])
def test_rows_without_loss_weigh_nothing(ranks, folder, layout):
    """Ranks and micro batches whose rows are all masked must not pull the mean down."""
    make_store(folder / "masked", rows=18, masked=(1, 4, 5, 7, 10, 12, 13))
    plain = np.array(ranks(1, plain_training, f"{folder}/model", f"{folder}/masked", STEPS)[0])
    world_size, options = LAYOUTS[layout]
    options = {"max_steps": STEPS, **options}
    values = ranks(world_size, train, f"{folder}/model", f"{folder}/masked", f"{folder}/masked {layout}", options)
    np.testing.assert_allclose(history(values), plain, rtol=0, atol=TOLERANCE)


FREEZE = ["embed_tokens", "layers.1", "up_proj", "gate_proj"]
FROZEN = {
    "one rank, full recomputation": LAYOUTS["full recomputation"],
    "TP2": LAYOUTS["TP2"],
    "PP2": LAYOUTS["PP2"],
    "DP2 with overlap": (2, GRADIENTS_AND_WEIGHTS),
}


@pytest.fixture(scope="module")
def plain_frozen(ranks, folder) -> np.ndarray:
    """Also saves the model as it is."""
    ranks(1, save_as_it_is, f"{folder}/model", folder / "as it is")
    parts = ("embed_tokens", "layers.1.", "up_proj", "gate_proj")
    return np.array(ranks(1, plain_training, f"{folder}/model", f"{folder}/store", 4, None, parts)[0])


@pytest.mark.parametrize("layout", FROZEN)
def test_frozen_weights_keep_every_bit_and_the_others_train_as_in_plain_torch(ranks, folder, plain_frozen, layout):
    world_size, options = FROZEN[layout]
    places, out = (f"{folder}/model", f"{folder}/store"), folder / f"frozen {layout}"
    options = {"max_steps": 4, "freeze": FREEZE, **options}
    values = ranks(world_size, train, *places, str(out), options)
    np.testing.assert_allclose(history(values), plain_frozen, rtol=0, atol=TOLERANCE)
    before, after = weights(folder / "as it is"), weights(out / "final")
    same = {name: (before[name] == after[name]).flatten(1).all(1).tolist() for name in after if after[name].ndim > 1}
    assert all(same["embedding.word_embeddings.weight"])
    assert same["decoder.layers.mlp.linear_fc1.weight"] == [True] * 4
    for name in ("decoder.layers.mlp.linear_fc2.weight", "decoder.layers.self_attention.linear_qkv.weight"):
        assert same[name] == [False, True, False, False]


def save_as_it_is(model: str, out: Path) -> None:
    from mca_lib.models import AutoModel
    from mca_lib.parallel import DistributingParallelArguments, initialize_model_parallel

    initialize_model_parallel(DistributingParallelArguments())
    AutoModel.from_pretrained(model).save_pretrained(out)


def test_a_stage_without_anything_to_train_is_refused(ranks, folder):
    options = {"freeze": ["embed_tokens", "layers.0", "layers.1"], **LAYOUTS["PP2"][1]}
    with pytest.raises(RankError, match="ConfigError: freeze: a pipeline stage would have nothing to train"):
        ranks(2, train, f"{folder}/model", f"{folder}/store", f"{folder}/refused", options)


EXPERT_STEPS = 4
BALANCE = {
    "qwen2-moe": {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.05},
    "deepseek-mtp": {"moe_aux_loss_coeff": 0.5, "moe_router_bias_update_rate": 0.01, "mtp_loss_weight": 0.3},
}
EXPERT_LAYOUTS = {
    "EP2": (2, {"expert_model_parallel_size": 2}),
    "EP2 with overlap": (2, {"expert_model_parallel_size": 2, **GRADIENTS_AND_WEIGHTS}),
    "TP2 with sequence parallelism": LAYOUTS["TP2 with sequence parallelism"],
    "PP2": LAYOUTS["PP2"],
    "CP2": LAYOUTS["CP2"],
    "DP2 with overlap": OVERLAPS["DP2"],
    "micro batch of 2": LAYOUTS["micro batch of 2"],
    "full recomputation": LAYOUTS["full recomputation"],
}


@pytest.fixture(scope="module")
def experts(ranks, folder):
    """Gated shared experts between dense layers; and latent attention, groups and multi-token prediction.

    Losses and gradient norms of both, by plain torch where it can, and the log of one rank.
    """
    ranks(1, make_sources, folder, list(BALANCE), "float32")
    found = {}
    for variant, balance in BALANCE.items():
        model, store = f"{folder}/{variant}", f"{folder}/store"
        options = {"max_steps": EXPERT_STEPS, **balance}
        alone = ranks(1, train, model, store, f"{folder}/{variant} alone", options)
        found |= {variant: history(alone), f"{variant} log": alone[0]["log"]}
        if variant == "qwen2-moe":
            # Plain torch has no loss of multi-token prediction, which `test_parity` compares.
            found[variant] = np.array(ranks(1, plain_training, model, store, EXPERT_STEPS, balance)[0])
    return found


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
@pytest.mark.parametrize("variant", ["qwen2-moe", "deepseek-mtp"])
def test_models_with_experts_train_the_same_at_every_layout(ranks, folder, experts, variant, layout):
    world_size, options = EXPERT_LAYOUTS[layout]
    function, options = train_in_buckets if "overlap" in layout else train, {**BALANCE[variant], **options}
    places = f"{folder}/{variant}", f"{folder}/store", f"{folder}/{variant} {layout}"
    values = ranks(world_size, function, *places, {"max_steps": EXPERT_STEPS, **options})
    np.testing.assert_allclose(history(values), experts[variant], rtol=0, atol=TOLERANCE)
    for name in ("expert_load_imbalance", "moe_aux_loss"):
        measured = [line[name] for line in values[0]["log"]]
        np.testing.assert_allclose(measured, [line[name] for line in experts[f"{variant} log"]], atol=1e-3)


def test_losses_of_routers_are_in_the_gradients_and_not_in_the_loss(ranks, folder, experts):
    places = f"{folder}/qwen2-moe", f"{folder}/store", f"{folder}/unbalanced"
    unbalanced = history(ranks(1, train, *places, {"max_steps": 1}))
    assert unbalanced[0, 0] == pytest.approx(experts["qwen2-moe"][0, 0])
    assert abs(unbalanced[0, 1] - experts["qwen2-moe"][0, 1]) > 10 * TOLERANCE


def test_balancing_what_a_model_does_not_have_is_refused(ranks, folder, experts):
    options = {"moe_router_bias_update_rate": 0.1}
    with pytest.raises(RankError, match=r"ConfigError: training\.moe_router_bias_update_rate=0\.1: .* have no "):
        ranks(1, train, f"{folder}/qwen2-moe", f"{folder}/store", f"{folder}/refused", options)
