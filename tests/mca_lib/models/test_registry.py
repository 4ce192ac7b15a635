"""What preflight asks of a config.json: refused by name, or read exactly."""

from typing import Any

import pytest

from mca_lib.errors import ConfigError, ModelError
from mca_lib.models.config import Llama3Rope
from mca_lib.models.layout import Layout
from mca_lib.models.registry import FAMILIES, check_hf_config, check_layout, config_from_hf

BASE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}

LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

REFUSED = {
    "model_type": "mixtral",
    "hidden_act": "gelu",
    "mlp_bias": True,
    "sliding_window": (4096, {"use_sliding_window": True}),
    "use_sliding_window": True,
    "layer_types": ["full_attention", "sliding_attention"],
    "partial_rotary_factor": 0.5,
    "quantization_config": {"quant_method": "fp8"},
    "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
    "attention_multiplier": 0.01,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.2,
    "logits_scaling": 8.0,
    "clip_qkv": 8.0,
    "no_rope_layers": [1, 0],
    "num_experts": 8,
    "num_local_experts": 8,
    "is_encoder_decoder": True,
    "add_cross_attention": True,
    "architectures": ["LlamaForSequenceClassification"],
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
    "rope_scaling": {"type": "linear", "factor": 2.0},
}


@pytest.mark.parametrize("field", REFUSED)
def test_field_that_is_not_carried_over_is_refused_by_name(field: str) -> None:
    value = REFUSED[field]
    value, others = value if isinstance(value, tuple) else (value, {})
    with pytest.raises(ModelError, match=field) as error:
        check_hf_config({**BASE, **others, field: value})
    assert "\n" not in str(error.value)


def test_every_neutral_field_of_the_tables_is_among_the_refused() -> None:
    fields = {rule.hf for family in FAMILIES.values() for rule in family.neutral}
    assert fields <= set(REFUSED)


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"])
def test_missing_size_is_named(field: str) -> None:
    with pytest.raises(ModelError, match=field):
        check_hf_config({k: v for k, v in BASE.items() if k != field})


def test_size_that_is_no_number_is_named() -> None:
    with pytest.raises(ModelError, match="hidden_size"):
        check_hf_config({**BASE, "hidden_size": "48", "head_dim": 8})


NAN = float("nan")
ODD = {
    "model_type": [["llama"], 3, {}],
    "rms_norm_eps": ["1e-5", 1, True, None, [1e-5], NAN, float("inf"), -1e-5],
    "tie_word_embeddings": ["false", 1, None],
    "attention_bias": ["x", 0],
    "mlp_bias": [0],
    "rope_parameters": [[], "x"],
    "rope_scaling": [[1]],
    "rope_theta": ["1e4", NAN, True, -1.0],
    "attention_dropout": ["x", NAN, 1.0],
    "initializer_range": [NAN, None, "x", -1.0],
    "eos_token_id": ["x", 1.5, [True]],
    "dtype": ["float8", 3, ["float32"]],
    "torch_dtype": ["float8"],
    "architectures": ["LlamaForCausalLM", 3],
    "layer_types": [3, [["full_attention"]]],
    "num_attention_heads": ["6", 0, 2.0, True],
    "num_key_value_heads": ["2", 0],
    "max_position_embeddings": [None, 2.0],
    "vocab_size": [NAN],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in ODD.items() for value in values])
def test_value_of_another_kind_is_named_on_one_line(field: str, value: object) -> None:
    with pytest.raises(ModelError, match=rf"^config\.json: {field}\b") as error:
        check_hf_config({**BASE, field: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["rope_theta", "factor", "original_max_position_embeddings"])
@pytest.mark.parametrize("value", ["8", NAN, 0])
def test_rope_number_of_another_kind_is_named(field: str, value: object) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3, field: value}
    with pytest.raises(ModelError, match=rf"rope_parameters\.{field}="):
        check_hf_config({**BASE, "rope_parameters": rope})


def test_misspelt_model_type_gets_the_nearest_one() -> None:
    with pytest.raises(ModelError, match="did you mean 'qwen2'"):
        check_hf_config({**BASE, "model_type": "qwen_2"})


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
    ids=["transformers 4", "older still", "transformers 5"],
)
def test_rope_is_read_from_both_spellings(spelling: dict[str, Any]) -> None:
    config = config_from_hf({**BASE, **spelling})
    assert (config.rotary_base, config.rope_scaling) == (5e5, Llama3Rope(32.0, 1.0, 4.0, 8192))


@pytest.mark.parametrize("factor", LLAMA3)
def test_llama3_factors_have_no_defaults(factor: str) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    del rope[factor]
    with pytest.raises(ModelError, match=rf"rope_parameters\.{factor}"):
        check_hf_config({**BASE, "rope_parameters": rope})


def test_plain_rope_of_transformers_5_is_not_taken_for_a_scaled_one() -> None:
    config = config_from_hf({**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}})
    assert (config.rotary_base, config.rope_scaling) == (1e5, None)


def test_two_ropes_that_differ_are_refused() -> None:
    both = {"rope_parameters": {"rope_theta": 1e5}, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    with pytest.raises(ModelError, match="both given"):
        check_hf_config({**BASE, **both})


def test_sliding_window_that_is_switched_off_is_accepted() -> None:
    check_hf_config({**BASE, "model_type": "qwen2", "architectures": None, "sliding_window": 4096})


def test_family_decides_biases_norms_and_head_size() -> None:
    plain = {**BASE, "architectures": None}
    llama, qwen2, qwen3 = (config_from_hf({**plain, "model_type": t}) for t in ("llama", "qwen2", "qwen3"))
    assert (llama.qkv_bias, llama.attention_output_bias, llama.qk_layernorm, llama.kv_channels) == (0, 0, 0, 8)
    assert (qwen2.qkv_bias, qwen2.attention_output_bias, qwen2.qk_layernorm, qwen2.kv_channels) == (1, 0, 0, 8)
    assert (qwen3.qkv_bias, qwen3.attention_output_bias, qwen3.qk_layernorm, qwen3.kv_channels) == (0, 0, 1, 128)
    biased = config_from_hf({**plain, "attention_bias": True})
    assert (biased.qkv_bias, biased.attention_output_bias) == (True, True)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_config_goes_back_as_it_came(model_type: str) -> None:
    hf = {**BASE, "model_type": model_type, "architectures": None, "num_key_value_heads": None, "my_own_key": [1, 2]}
    config = config_from_hf(hf)
    assert FAMILIES[model_type].config_to_hf(config) == hf


def test_changed_field_reaches_the_hf_config() -> None:
    import dataclasses

    config = dataclasses.replace(config_from_hf(BASE), vocab_size=128, tie_word_embeddings=True)
    hf = FAMILIES["llama"].config_to_hf(config)
    assert hf == {**BASE, "vocab_size": 128, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 4}, r"parallel.tensor=4 .* 6 attention heads; use one of \[1, 2\]"),
        ({"tensor": 3}, r"parallel.tensor=3 .* 2 key/value heads; use one of \[1, 2\]"),
        ({"tensor": 6}, "parallel.tensor=6 .* 2 key/value heads"),
        ({"pipeline": 4}, r"parallel.pipeline=4 .* 6 layers; use one of \[1, 2, 3, 6\]"),
        ({"pipeline": 2, "virtual_pipeline": 2}, r"virtual_pipeline=4 .* 6 layers"),
        ({"virtual_pipeline": 2}, "parallel.virtual_pipeline=2 needs parallel.pipeline"),
        ({"sequence_parallel": True}, "parallel.sequence_parallel needs parallel.tensor"),
        ({"expert": 2}, "parallel.expert=2"),
    ],
)
def test_layout_that_does_not_fit_names_both_sides(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layout(BASE, Layout(**sizes))


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"pipeline": 3, "virtual_pipeline": 2, "tensor": 2}])
def test_layout_that_fits_is_accepted(sizes: dict[str, Any]) -> None:
    check_layout(BASE, Layout(**sizes))


def test_ranks_may_share_a_key_value_head() -> None:
    check_layout({**BASE, "num_attention_heads": 8, "head_dim": 8}, Layout(tensor=4))


def test_mlp_that_does_not_divide_is_named() -> None:
    with pytest.raises(ConfigError, match="MLP size 97"):
        check_layout({**BASE, "intermediate_size": 97}, Layout(tensor=2))
