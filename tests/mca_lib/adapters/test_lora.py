"""Adapters are PEFT's: the same losses and gradients as by PEFT or plain torch, whatever the layout, in fp32."""

import filecmp
import math

import numpy as np
import pytest
from safetensors.torch import load_file

from mca_lib.adapters.peft_files import BASE_NAME, WEIGHTS_NAME
from mca_lib.checkpoint.sealed import RECORD_NAME
from tests.mca_lib.adapters.lora_ranks import (
    adapter_and_gradients,
    logits_four_ways,
    replicated_after_dropout,
    train_lora,
    train_preferences,
)
from tests.mca_lib.adapters.plain_lora import plain_gradients, plain_training
from tests.mca_lib.checkpoint.expert_ranks import make_sources
from tests.mca_lib.trainers.preference_training import make_pair_store
from tests.mca_lib.trainers.training import history, in_buckets, make_store
from tests.ranks import RankError

PLAIN = {
    "llama": "peft",
    "qwen3": "peft",
    "phi3-longrope": "peft",
    "qwen3-moe": "functional",
    "qwen3.5": "peft",
    "deepseek-mtp": "functional",
}
STEPS = 10
# Relative, fp32; sums are taken in another order.
TOLERANCE = 1e-5
# Both libraries' gradients of gated delta nets are 1e-5 away from those in float64.
LOOSER = {"qwen3.5": 10}

SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = {
    "one rank": (1, {}),
    "DP2 with overlap": (2, OVERLAP),
    "EP2 with overlap": (2, {"expert_model_parallel_size": 2, **OVERLAP}),
    "full recomputation": (1, {"recompute_granularity": "full"}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "TP2 SP": (2, SEQUENCE),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "PP2 VPP2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "CP2": (2, {"context_parallel_size": 2}),
    "EP2": (2, {"expert_model_parallel_size": 2}),
    "ETP2": (2, {"expert_tensor_parallel_size": 2}),
    "TP2 SP ETP1": (2, {**SEQUENCE, "expert_tensor_parallel_size": 1}),
    "TP4 SP, more ranks than key heads": (4, {**SEQUENCE, "tensor_model_parallel_size": 4}),
}


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    ranks(1, make_sources, folder, list(PLAIN), "float32")
    make_store(folder / "store", rows=18)
    return folder


def distance(found, expected) -> float:
    """Largest relative distance of two adapters' matrices."""
    assert found.keys() == expected.keys()
    return max(((found[n] - e).norm() / e.norm()).item() for n, e in expected.items())


def tolerance(variant: str) -> float:
    return TOLERANCE * LOOSER.get(variant, 1)


def assert_same_adapter(found, expected, tolerance=TOLERANCE) -> None:
    """Adam turns rounding in small gradients into steps, so that a single matrix may be further off."""
    assert distance(found, expected) < 10 * tolerance
    difference = sum((found[n] - e).square().sum() for n, e in expected.items()) ** 0.5
    assert difference / sum(e.square().sum() for e in expected.values()) ** 0.5 < tolerance


@pytest.fixture(scope="module")
def gradients(ranks, folder):
    """Loss and gradients by plain torch, computed when a model is first asked for."""
    known: dict[str, dict] = {}

    def of(variant: str) -> dict:
        if variant not in known:
            known[variant] = ranks(1, plain_gradients, f"{folder}/{variant}", f"{folder}/store", {})[0]
        return known[variant]

    return of


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        ("llama", "PP2 VPP2"),
        ("llama", "TP4 SP, more ranks than key heads"),
        ("qwen3", "CP2"),
        ("phi3-longrope", "TP2 SP"),
        ("qwen3-moe", "EP2"),
        ("qwen3-moe", "TP2 SP ETP1"),
        ("qwen3.5", "TP4 SP, more ranks than key heads"),
        ("deepseek-mtp", "TP2 SP"),
    ],
)
def test_gradients_equal_plain_torch_and_the_file_is_the_same_bytes(ranks, folder, gradients, variant, layout):
    world_size, options = LAYOUTS[layout]
    plain, stem = gradients(variant), f"{folder}/{variant} {layout}"
    places = f"{folder}/{variant}", f"{folder}/store", f"{stem} adapter", f"{stem} gradients"
    losses = ranks(world_size, adapter_and_gradients, *places, options, {})
    assert losses[0] == pytest.approx(plain["loss"], rel=1e-6)
    assert distance(load_file(f"{stem} gradients/{WEIGHTS_NAME}"), plain["gradients"]) < tolerance(variant)
    first = folder / f"{variant} first.safetensors"
    if not first.exists():
        first.write_bytes((folder / f"{variant} {layout} adapter" / WEIGHTS_NAME).read_bytes())
    assert filecmp.cmp(first, folder / f"{variant} {layout} adapter" / WEIGHTS_NAME, shallow=False)


@pytest.fixture(scope="module")
def alone(ranks, folder):
    """(history, adapter) of a training on one rank."""
    known: dict[str, tuple] = {}

    def of(variant: str) -> tuple:
        if variant not in known:
            out = f"{folder}/{variant} alone"
            values = ranks(1, train_lora, f"{folder}/{variant}", f"{folder}/store", out, {"max_steps": STEPS}, {})
            known[variant] = history(values), load_file(f"{out}/final/{WEIGHTS_NAME}")
        return known[variant]

    return of


@pytest.mark.parametrize("variant", PLAIN)
def test_training_equals_pefts(ranks, folder, alone, variant):
    """Losses and gradient norms of every step, and the adapter at the end."""
    plain = ranks(1, plain_training, PLAIN[variant], f"{folder}/{variant}", f"{folder}/store", STEPS, {})[0]
    curve, adapter = alone(variant)
    np.testing.assert_allclose(curve, np.array(plain["log"]), rtol=tolerance(variant))
    assert_same_adapter(adapter, plain["adapter"], tolerance(variant))
    assert curve[-1, 0] < curve[0, 0]


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        ("llama", "PP2 VPP2"),
        ("qwen3-moe", "TP2 SP ETP1"),
        ("qwen3-moe", "DP2 with overlap"),
        ("deepseek-mtp", "EP2 with overlap"),
    ],
)
def test_every_layout_trains_the_same_adapter(ranks, folder, alone, variant, layout):
    world_size, options = LAYOUTS[layout]
    out = f"{folder}/{variant} {layout} trained"
    options = {"max_steps": STEPS, **options}
    values = ranks(world_size, in_buckets, train_lora, f"{folder}/{variant}", f"{folder}/store", out, options, {})
    curve, adapter = alone(variant)
    np.testing.assert_allclose(history(values), curve, rtol=TOLERANCE)
    assert_same_adapter(load_file(f"{out}/final/{WEIGHTS_NAME}"), adapter)


@pytest.mark.parametrize("variant", PLAIN)
def test_peft_loads_the_adapter_and_the_merged_model_is_the_same(ranks, folder, variant):
    """Logits of the Megatron model with adapters, of PEFT's on transformers' model, and of the merged model."""
    logits = ranks(1, logits_four_ways, f"{folder}/{variant}", f"{folder}/{variant} logits", {"use_rslora": True})[0]
    scale = logits["megatron"].abs().max()
    for way in ("peft", "merged"):
        assert (logits["megatron"] - logits[way]).abs().max() / scale < TOLERANCE, way
    assert (logits["megatron"] - logits["base"]).abs().max() / scale > 0.01


def test_some_modules_alone_can_be_adapted(ranks, folder):
    """One of three fused modules, a shared expert without the routed ones, one layer."""
    targets = ["k_proj", "layers.2.self_attn.o_proj"]
    logits = ranks(1, logits_four_ways, f"{folder}/qwen3", f"{folder}/some", {"target_modules": targets})[0]
    assert (logits["megatron"] - logits["peft"]).abs().max() / logits["megatron"].abs().max() < TOLERANCE
    targets = ["q_b_proj", "shared_experts.up_proj"]
    logits = ranks(1, logits_four_ways, f"{folder}/deepseek-mtp", f"{folder}/shared", {"target_modules": targets})[0]
    assert (logits["megatron"] - logits["peft"]).abs().max() / logits["megatron"].abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("variant", "options"), [("llama", {"tensor_model_parallel_size": 2}), ("qwen3-moe", SEQUENCE)]
)
def test_dropout_masks_inputs_that_ranks_share_alike(ranks, folder, variant, options):
    """Else the matrices that every rank holds whole would drift apart."""
    places = f"{folder}/{variant}", f"{folder}/store", f"{folder}/{variant} dropout"
    first, second = ranks(2, replicated_after_dropout, *places, {"max_steps": 3, **options}, {"lora_dropout": 0.3})
    assert first.keys() == second.keys()
    assert all((first[name] == second[name]).all() for name in first)


def test_a_bf16_training_keeps_fp32_adapters(ranks, folder, alone):
    out = folder / "bf16"
    options = {"max_steps": STEPS, "bf16": True}
    values = ranks(2, train_lora, f"{folder}/llama", f"{folder}/store", str(out), options, {})
    adapter = load_file(out / "final" / WEIGHTS_NAME)
    assert {str(tensor.dtype) for tensor in adapter.values()} == {"torch.float32"}
    assert not all((tensor == tensor.bfloat16()).all() for tensor in adapter.values())
    np.testing.assert_allclose(history(values)[:, 0], alone("llama")[0][:, 0], rtol=0.01)
    assert {path.name for path in (out / "final").iterdir()} == {
        WEIGHTS_NAME,
        "adapter_config.json",
        BASE_NAME,
        RECORD_NAME,
    }


def test_preferences_begin_at_the_model_without_adapters_and_train_the_same_everywhere(ranks, folder):
    make_pair_store(folder / "pairs", rows=8)
    curves = []
    for layout in ("one rank", "TP2 SP", "DP2 with overlap"):
        world_size, options = LAYOUTS[layout]
        places = f"{folder}/qwen3", f"{folder}/pairs", f"{folder}/pairs {layout}"
        log = ranks(world_size, train_preferences, *places, {"max_steps": 5, **options}, {"lora_dropout": 0.1})[0]
        curves.append([line["loss"] for line in log])
    assert curves[0][0] == pytest.approx(math.log(2), abs=1e-6)
    assert curves[0][-1] < curves[0][0]
    for curve in curves[1:]:
        np.testing.assert_allclose(curve, curves[0], rtol=TOLERANCE)


def test_a_stage_without_anything_to_train_is_refused_by_all_ranks(ranks, folder):
    options = {"max_steps": 1, "pipeline_model_parallel_size": 2}
    lora = {"target_modules": ["layers.0.self_attn.q_proj"]}
    with pytest.raises(RankError) as failure:
        ranks(2, train_lora, f"{folder}/llama", f"{folder}/store", f"{folder}/empty", options, lora)
    assert str(failure.value).count("a pipeline stage holds none of the modules") >= 2
