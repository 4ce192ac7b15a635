"""OLMo 2, Gemma 3 and GPT-OSS: what is theirs alone. Their logits and gradients are among those of `test_parity`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mca_lib.checkpoint.digest import checkpoint_digest
from mca_lib.errors import ConfigError, ModelError
from mca_lib.models.config import Experts, HybridLayers
from mca_lib.models.layout import Layout
from mca_lib.models.layout_rules import check_config_layout
from mca_lib.models.registry import FAMILIES, config_from_hf
from tests.mca_lib.adapters.lora_ranks import logits_four_ways
from tests.mca_lib.checkpoint import expert_ranks
from tests.mca_lib.models import parity_ranks, peculiar_ranks
from tests.mca_lib.models.layouts import EXPERT_LAYOUTS, LAYOUTS
from tests.mca_lib.models.test_parity import LOGITS, compare
from tests.mca_lib.models.test_registry import BASES
from tests.mca_lib.trainers.training import history, make_store, plain_training, train

VARIANTS = ["olmo2", "gemma3", "gpt-oss"]


@pytest.fixture(scope="module")
def models(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hf")
    ranks(1, parity_ranks.prepare, directory, VARIANTS)
    return directory


EXPERTS_ON_TWO_RANKS = (2, {"tensor": 2, "sequence_parallel": True, "expert": 2, "expert_tensor": 1})

ROWS = [
    (LAYOUTS["TP2 with sequence parallel"], True, ["olmo2", "gemma3"]),
    (LAYOUTS["TP2"], False, ["olmo2"]),
    (LAYOUTS["CP2"], True, VARIANTS),
    (LAYOUTS["PP2 with two chunks each"], False, ["gemma3", "gpt-oss"]),
    (EXPERT_LAYOUTS["TP2 with whole experts"], True, ["gpt-oss"]),
    (EXPERT_LAYOUTS["EP2"], False, ["gpt-oss"]),
    (EXPERTS_ON_TWO_RANKS, False, ["gpt-oss"]),
]


@pytest.mark.parametrize(("layout", "packed", "variants"), ROWS, ids=[f"{r[0][1]}" for r in ROWS])
def test_model_equals_transformers(ranks: Any, models: Path, layout: Any, packed: bool, variants: list[str]) -> None:
    compare(ranks, models, layout, variants, packed)


WRONG: dict[str, list[dict[str, Any]]] = {
    "olmo2": [{"rms_norm_eps": 1e-1}, {"rope_parameters": {"rope_type": "default", "rope_theta": 99.0}}],
    "gemma3": [
        {"query_pre_attn_scalar": 10},
        {"sliding_window": 8},
        {"layer_types": ["sliding_attention", "full_attention"] * 2},
        {"rope_parameters": {"full_attention": {"rope_theta": 100.0, "rope_type": "linear", "factor": 3.0}}},
        {"rope_parameters": {"full_attention": {"rope_theta": 100.0}, "sliding_attention": {"rope_theta": 30.0}}},
    ],
    "gpt-oss": [{"swiglu_limit": 1.6}, {"sliding_window": 8}, {"layer_types": ["full_attention"] * 4}],
}
"""Fields of config.json that are not those of the weights' model."""


@pytest.mark.parametrize("variant", WRONG)
def test_a_wrong_field_shows(ranks: Any, models: Path, variant: str) -> None:
    (errors,) = ranks(1, peculiar_ranks.errors_of_changed, models / variant, variant, [{}, *WRONG[variant]])
    right, *wrong = errors
    assert right <= LOGITS
    assert min(wrong) > 10 * LOGITS, dict(zip(map(str, WRONG[variant]), wrong, strict=True))


def test_weights_without_effect_would_show(ranks: Any, models: Path) -> None:
    """Sinks and biases at 0, and norms at 1, are another model."""
    (errors,) = ranks(1, peculiar_ranks.errors_without, models)
    assert min(errors.values()) > 10 * LOGITS, errors


def test_embeddings_are_scaled_as_transformers_rounds_them(ranks: Any, models: Path) -> None:
    assert ranks(1, peculiar_ranks.scaled_embeddings_are_equal, models / "gemma3") == [[True, True]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_written_back_and_saved_and_loaded_bitwise(ranks: Any, models: Path, tmp_path: Path, variant: str) -> None:
    layout = {"expert": 2} if variant == "gpt-oss" else {"tensor": 2}
    different = ranks(2, peculiar_ranks.round_trip, models / variant, tmp_path, layout)
    assert different == [[], []]


SAVED = [
    ({"pipeline": 2, "virtual_pipeline": 2}, VARIANTS),
    ({"tensor": 2}, ["olmo2", "gemma3"]),
    ({"tensor": 2, "expert_tensor": 1}, ["gpt-oss"]),
]


def test_digest_does_not_depend_on_who_writes(ranks: Any, tmp_path: Path) -> None:
    """Without a model, and by ranks at other layouts; in bf16."""
    sources = tmp_path / "hf"
    ranks(1, expert_ranks.make_sources, sources, VARIANTS, "bfloat16")
    ranks(1, expert_ranks.convert_all, sources, VARIANTS, tmp_path / "converted")
    for number, (layout, variants) in enumerate(SAVED):
        ranks(2, expert_ranks.save_all, layout, sources, variants, tmp_path / str(number))
        for variant in variants:
            found, expected = (checkpoint_digest(tmp_path / d / variant) for d in (str(number), "converted"))
            assert found == expected, (layout, variant)


SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
TRAINED = {
    "olmo2": SPLIT,
    "gemma3": {"context_parallel_size": 2},
    "gpt-oss": {**SPLIT, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2},
}


@pytest.mark.parametrize("variant", TRAINED)
def test_training_equals_plain_torch(ranks: Any, models: Path, tmp_path: Path, variant: str) -> None:
    """Loss and gradient norm, in which every weight counts once: sinks, norms over heads and biases of experts too."""
    model, store = str(models / variant), make_store(tmp_path / "store", rows=18)
    (plain,) = ranks(1, plain_training, model, str(store), 4)
    values = ranks(2, train, model, str(store), str(tmp_path / "out"), {"max_steps": 4, **TRAINED[variant]})
    np.testing.assert_allclose(history(values), np.array(plain), rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_adapters_are_pefts_and_merge_into_an_export(ranks: Any, models: Path, tmp_path: Path, variant: str) -> None:
    """Behind a norm of the output, beside sinks; experts without a module each have none."""
    (logits,) = ranks(1, logits_four_ways, str(models / variant), str(tmp_path), {"target_modules": ["all-linear"]})
    assert (logits["megatron"] - logits["peft"]).abs().max() < LOGITS
    assert (logits["merged"] - logits["peft"]).abs().max() < LOGITS
    assert (logits["base"] - logits["peft"]).abs().max() > 100 * LOGITS


def test_megatron_still_mixes_gradients_of_expert_biases(ranks: Any, models: Path) -> None:
    """A reason of `ExpertRowParallelLinear`; when this fails, try without."""
    for errors in ranks(2, peculiar_ranks.compare_with_megatrons_expert_bias, models, EXPERTS_ON_TWO_RANKS[1]):
        assert errors.logits <= LOGITS
        assert errors.gradient > 0.1
        assert errors.gradient_of.endswith("linear_fc2.bias")


def test_megatron_still_sums_gradients_of_query_and_key_norms_by_their_name(ranks: Any) -> None:
    """The reason why the norms over all heads have other names and a layer of their own."""
    assert ranks(1, peculiar_ranks.names_that_are_summed) == [True]


def test_layouts_that_the_models_cannot_have_are_refused() -> None:
    olmo = replace(config_from_hf(BASES["olmo2"]), num_query_groups=1)
    with pytest.raises(ConfigError, match=r"parallel.tensor=2 .*whose norm is over all of them; use one of \[1\]"):
        check_config_layout(olmo, Layout(tensor=2))
    oss = config_from_hf(BASES["gpt_oss"])
    with pytest.raises(ConfigError, match=r"parallel\.tensor=2: Megatron does not split experts with biases"):
        check_config_layout(oss, Layout(tensor=2))
    check_config_layout(oss, Layout(tensor=2, expert_tensor=1))


@pytest.mark.parametrize("model_type", ["olmo2", "gemma3_text", "gpt_oss"])
def test_no_hybrid_is_made_of_them(model_type: str) -> None:
    with pytest.raises(ConfigError, match="cannot become a hybrid") as error:
        config_from_hf(BASES[model_type]).with_hybrid(HybridLayers("*-" * 6), "hybrid_layer_pattern")
    assert "\n" not in str(error.value)
    assert f": {'an' if model_type == 'olmo2' else 'a'} {model_type} model" in str(error.value)


def test_biases_of_experts_go_with_those_of_attention() -> None:
    config = config_from_hf(BASES["gpt_oss"])
    for changes in ({"qkv_bias": False}, {"moe": replace(config.moe, layers=(0, 1))}):
        with pytest.raises(ModelError, match=r"moe\.bias goes with"):
            replace(config, **changes)
    assert isinstance(config.moe, Experts)


# Public config.json files, the fields that say what the model is.
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 262144,
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}


@pytest.mark.parametrize("hf", [GEMMA_3_1B, GPT_OSS_20B], ids=["gemma-3-1b-it", "gpt-oss-20b"])
def test_public_config_is_read_and_written_as_it_is(hf: dict[str, Any]) -> None:
    config = config_from_hf(hf)
    assert FAMILIES[hf["model_type"]].config_to_hf(config) == hf
    if hf["model_type"] == "gemma3_text":
        assert (config.sliding_window, config.full_attention_layers) == (512, (5, 11, 17, 23))
        assert (config.sliding_rotary_base, config.embedding_multiplier**2) == (1e4, pytest.approx(1152))
    else:
        assert (config.full_attention_layers, config.activation_clamp) == (tuple(range(1, 24, 2)), 7.0)


def test_vision_language_form_of_gemma_is_refused_with_a_hint() -> None:
    with pytest.raises(ModelError, match="model_type='gemma3' is not supported; did you mean 'gemma3_text'"):
        config_from_hf({**BASES["gemma3_text"], "model_type": "gemma3"})
