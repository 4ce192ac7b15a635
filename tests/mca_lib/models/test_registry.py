"""What preflight asks of a config.json: refused by name, or read exactly."""

from dataclasses import replace
from typing import Any

import pytest

from mca_lib.errors import ModelError
from mca_lib.models import registry
from mca_lib.models.registry import check_hf_config, config_from_hf
from mca_lib.models.vision.towers import TOWERS

FAMILIES = {name: family for name, family in registry.FAMILIES.items() if name not in TOWERS}
"""Of text. Those that see images have configs of two parts: `vision/test_families.py`."""

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

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

BASES: dict[str, dict[str, Any]] = {
    name: {**BASE, "model_type": name, "architectures": [family.architecture]} for name, family in FAMILIES.items()
}
"""Model type → the smallest config that is accepted."""
BASES["mixtral"] |= {"num_local_experts": 4, "num_experts_per_tok": 2}
BASES["qwen2_moe"] |= {"num_experts": 4, **_EXPERTS}
BASES["qwen3_moe"] |= {"num_experts": 4, **_EXPERTS}
BASES["qwen3_next"] |= {"num_experts": 4, **_EXPERTS}
BASES["qwen3_5_moe_text"] |= {"num_experts": 4, **_EXPERTS}
BASES["deepseek_v3"] |= {"n_routed_experts": 16, "n_group": 8, "topk_group": 1, "num_key_value_heads": 6, **_EXPERTS}
BASES["minimax_m2"] |= {"num_local_experts": 4, "num_experts_per_tok": 2}
BASES["glm4_moe"] |= {"n_routed_experts": 8, **_EXPERTS}
BASES["gpt_oss"] |= {"num_local_experts": 4, "num_experts_per_tok": 2}
BASES["nemotron_h"] |= {"layers_block_type": ["mamba", "mlp", "attention", "moe", "linear_attention", "full_attention"]}

REFUSED = {
    "hidden_act": "gelu",
    "mlp_bias": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "quantization_config": {"quant_method": "fp8"},
    "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
    "hidden_activation": "silu",
    "use_bidirectional_attention": True,
    "swiglu_alpha": 1.5,
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
    "router_jitter_noise": 0.1,
    "rope_interleave": False,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "moe_layer_freq": 2,
    "lm_head_bias": True,
    "use_qk_norm": False,
    "use_routing_bias": False,
    "shared_intermediate_size": 8,
    "qk_norm_type": "per_head",
    "attn_type_list": [1, 0],
    "is_causal": False,
    "tie_word_embeddings": True,
    "mlp_hidden_act": "silu",
    "mamba_hidden_act": "gelu",
    "use_bias": True,
    "mamba_proj_bias": True,
    "use_conv_bias": False,
    "mamba_conv_bias": False,
    "time_step_limit": [0.001, 10.0],
    "mamba_dt_limit": [0.001, 10.0],
    "sliding_window": 17,
    "residual_in_fp32": True,
    "attn_output_gate": False,
    "output_gate_type": "sigmoid",
    "mtp_use_dedicated_embeddings": True,
    "mtp_num_hidden_layers": 2,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 2,
    "hidden_dropout": 0.1,
    "moe_latent_size": 16,
    "num_nextn_predict_layers": 1,
}
"""Field of a `Neutral` rule → a value that changes the mathematics."""

REFUSED_BY = {("gpt_oss", "attention_bias"): False}
"""The same for a family whose rule is another."""

RULES = [(name, rule.hf) for name, family in FAMILIES.items() for rule in family.neutral]


@pytest.mark.parametrize("model_type", BASES)
def test_smallest_config_is_accepted(model_type: str) -> None:
    check_hf_config(BASES[model_type])


@pytest.mark.parametrize(("model_type", "field"), RULES)
def test_field_that_is_not_carried_over_is_refused_by_name(model_type: str, field: str) -> None:
    with pytest.raises(ModelError, match=field) as error:
        check_hf_config({**BASES[model_type], field: REFUSED_BY.get((model_type, field), REFUSED[field])})
    assert "\n" not in str(error.value)


NULL_IS_FALSE = [
    *((name, "is_causal") for name in FAMILIES),
    *(("deepseek_v3", field) for field in ("norm_topk_prob", "rope_interleave")),
    ("glm4_moe", "norm_topk_prob"),
]
"""Fields whose null transformers takes for false, where an absent one is true."""


@pytest.mark.parametrize(("model_type", "field"), NULL_IS_FALSE)
def test_null_that_stands_for_false_is_refused(model_type: str, field: str) -> None:
    with pytest.raises(ModelError, match=rf"^config\.json: {field}=null is not supported"):
        check_hf_config({**BASES[model_type], field: None})


@pytest.mark.parametrize("model_type", BASES)
def test_other_architecture_is_refused(model_type: str) -> None:
    with pytest.raises(ModelError, match="architectures"):
        check_hf_config({**BASES[model_type], "architectures": ["LlamaForSequenceClassification"]})


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
    "rope_scaling": [[1], {"rope_type": ["linear"]}, {"type": ["linear"], "factor": 2.0}],
    "rope_theta": ["1e4", NAN, True, -1.0],
    "attention_dropout": ["x", NAN, 1.0],
    "initializer_range": [NAN, None, "x", -1.0],
    "eos_token_id": ["x", 1.5, [True]],
    "dtype": ["float8", 3, ["float32"]],
    "torch_dtype": ["float8"],
    "architectures": ["LlamaForCausalLM", 3],
    "layer_types": [3, [["full_attention"]]],
    "num_attention_heads": ["6", 0, 2.0, True],
    "num_hidden_layers": [10**12, 0],
    "num_key_value_heads": ["2", 0],
    "max_position_embeddings": [None, 2.0],
    "vocab_size": [NAN],
    "qkv_bias": [None],
    "n_group": [None],
    "topk_group": [None],
    "n_shared_experts": [None],
    "routed_scaling_factor": [0.0, 0, -1.0],
    "swiglu_limit": [0, "7"],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in ODD.items() for value in values])
def test_value_of_another_kind_is_named_on_one_line(field: str, value: object) -> None:
    with pytest.raises(ModelError, match=rf"^config\.json: {field}\b") as error:
        check_hf_config({**BASE, field: value})
    assert "\n" not in str(error.value)


OPTIONAL = {"num_key_value_heads", "rms_norm_eps", "n_group", "topk_group"}


@pytest.mark.parametrize("model_type", BASES)
def test_absent_field_has_the_default_of_transformers(model_type: str) -> None:
    """transformers writes every field that it has; what it wrote must mean what the short config means."""
    from transformers import AutoConfig

    hf = {name: value for name, value in BASES[model_type].items() if name not in OPTIONAL}
    hf |= {"num_attention_heads": 128, "hidden_size": 1024}  # the defaults of key/value heads divide 128
    hf |= {"num_experts_per_tok": 8} if model_type == "deepseek_v3" else {}  # the default groups allow 8
    written = AutoConfig.for_model(**hf).to_dict()
    assert replace(config_from_hf(written), hf_config=hf) == config_from_hf(hf)
    absent = {f.hf for f in FAMILIES[model_type].fields if not {f.hf, *f.aliases} & set(hf)}
    assert len(absent & set(written)) >= 5, "the defaults of these were compared"


def test_misspelt_model_type_gets_the_nearest_one() -> None:
    with pytest.raises(ModelError, match="did you mean 'qwen2'"):
        check_hf_config({**BASE, "model_type": "qwen_2"})


def test_family_decides_biases_norms_and_head_size() -> None:
    plain = {**BASE, "architectures": None}
    llama, qwen2, qwen3 = (config_from_hf({**plain, "model_type": t}) for t in ("llama", "qwen2", "qwen3"))
    assert (llama.qkv_bias, llama.attention_output_bias, llama.qk_layernorm, llama.kv_channels) == (0, 0, 0, 8)
    assert (qwen2.qkv_bias, qwen2.attention_output_bias, qwen2.qk_layernorm, qwen2.kv_channels) == (1, 0, 0, 8)
    assert (qwen3.qkv_bias, qwen3.attention_output_bias, qwen3.qk_layernorm, qwen3.kv_channels) == (0, 0, 1, 128)
    biased = config_from_hf({**plain, "attention_bias": True})
    assert (biased.qkv_bias, biased.attention_output_bias) == (True, True)


@pytest.mark.parametrize("model_type", BASES)
def test_config_goes_back_as_it_came(model_type: str) -> None:
    hf = {**BASES[model_type], "num_key_value_heads": None, "my_own_key": [1, 2]}
    hf |= {"num_key_value_heads": 6} if model_type == "deepseek_v3" else {}
    config = config_from_hf(hf)
    assert FAMILIES[model_type].config_to_hf(config) == hf


def test_changed_field_reaches_the_hf_config() -> None:
    import dataclasses

    config = dataclasses.replace(config_from_hf(BASE), vocab_size=128, tie_word_embeddings=True)
    hf = FAMILIES["llama"].config_to_hf(config)
    assert hf == {**BASE, "vocab_size": 128, "tie_word_embeddings": True}
