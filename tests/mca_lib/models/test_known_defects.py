"""What went wrong in other converters, each shown to be absent: configs, ropes, norms, and models beside each other."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mca_lib.converter.plan import TensorInfo, entries, make_plan
from mca_lib.errors import ModelError
from mca_lib.models.registry import FAMILIES, config_from_hf
from tests.mca_lib.models.layouts import layout_args
from tests.mca_lib.models.test_registry import BASE, BASES
from tests.mca_lib.tiny_models import hf_config, save_hf

WITHOUT_EFFECT = {
    # Generation and training of other programs.
    *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "output_router_logits"),
    # A way of splitting products that gives the same ones; transformers 5 ignores it.
    "pretraining_tp",
    # Of the window of a family that has switched it off.
    *("sliding_window", "max_window_layers"),
}
"""Fields of transformers' config classes that change no logit."""
OF_ONE_FAMILY = {
    # A dropout that the model's code does not have; a length that only a scaled rope has, which `BASES` has not.
    "phi3": {"embd_pdrop", "original_max_position_embeddings"},
    "nemotron_h": {
        # Initialization.
        *("rescale_prenorm_residual", "time_step_max", "time_step_floor"),
        # A limit that transformers has and the models were trained without: see families/nemotron_h.py.
        "time_step_min",
        # How it is computed, and which logits are returned.
        *("use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "num_logits_to_keep"),
        # The model's code reads none of them.
        *("expand", "n_shared_experts", "mtp_layers_block_type"),
    },
}


class Read(dict[str, Any]):
    """A config that remembers which of its fields were asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)


@pytest.mark.parametrize("model_type", BASES)
def test_every_field_of_transformers_class_is_read_or_has_no_effect(model_type: str) -> None:
    from transformers import AutoConfig, PreTrainedConfig

    cls = type(AutoConfig.for_model(model_type))
    own = {f.name for f in dataclasses.fields(cls)} - {f.name for f in dataclasses.fields(PreTrainedConfig)}
    config = Read(BASES[model_type])
    FAMILIES[model_type].config_from_hf(config)
    assert own - config.asked <= WITHOUT_EFFECT | OF_ONE_FAMILY.get(model_type, set())


def megatron(hf: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    """Fields of Megatron's config that say what the model is."""
    from mca_lib.models.transformer_config import transformer_config

    config = transformer_config(config_from_hf(hf), layout_args(**layout))
    names = ("mtp_num_layers", "attention_dropout", "hidden_dropout", "layernorm_epsilon", "moe_router_topk")
    return {name: getattr(config, name) for name in names}


def test_arguments_say_how_a_model_runs_and_never_what_it_is(ranks: Any) -> None:
    """Elsewhere a default argument of 0 overrides the config's, and prediction layers are lost without a word."""
    deepseek = {**BASES["deepseek_v3"], "num_nextn_predict_layers": 1, "attention_dropout": 0.25}
    expected = {
        "mtp_num_layers": 1,
        "attention_dropout": 0.25,
        "hidden_dropout": 0.0,  # Megatron's own default is 0.1
        "layernorm_epsilon": 1e-5,
        "moe_router_topk": 2,
    }
    for layout in ({}, {"pipeline": 2, "expert": 2}):
        assert ranks(1, megatron, deepseek, layout) == [expected]


def two_sizes(directory: Path) -> list[float]:
    """Largest |Δ| of logits of two models of one type and of different sizes, loaded in one process."""
    import torch
    from transformers import AutoModelForCausalLM

    from mca_lib.models import AutoModel
    from mca_lib.parallel import DistributingParallelArguments, initialize_model_parallel

    initialize_model_parallel(DistributingParallelArguments())
    ids = torch.arange(12)[None]
    errors = []
    for name in ("small", "large", "small"):
        (model,) = AutoModel.from_pretrained(directory / name).eval()
        reference = AutoModelForCausalLM.from_pretrained(directory / name, attn_implementation="eager")
        with torch.no_grad():
            errors.append((model(ids, ids) - reference(ids).logits).abs().max().item())
    return errors


def test_two_models_of_one_type_do_not_share_sizes(ranks: Any, tmp_path: Path) -> None:
    ranks(1, save_hf, tmp_path / "small", "llama")
    ranks(1, save_sized, tmp_path / "large")
    ((*errors,),) = ranks(1, two_sizes, tmp_path)
    assert max(errors) < 1e-4


def save_sized(directory: Path) -> None:
    save_hf(directory, "llama", hidden_size=64, num_attention_heads=8, intermediate_size=80)


def load_after_a_failure(directory: Path) -> list[str]:
    from mca_lib.models import AutoModel
    from mca_lib.parallel import DistributingParallelArguments, initialize_model_parallel

    initialize_model_parallel(DistributingParallelArguments())
    outcomes = []
    for name in ("broken", "whole"):
        try:
            AutoModel.from_pretrained(directory / name)
            outcomes.append("loaded")
        except ModelError as error:
            outcomes.append(str(error))
    return outcomes


def test_failed_load_leaves_nothing_behind(ranks: Any, tmp_path: Path) -> None:
    for name in ("broken", "whole"):
        ranks(1, save_hf, tmp_path / name, "llama")
    path = tmp_path / "broken" / "config.json"
    path.write_text(path.read_text().replace('"silu"', '"gelu"'))
    ((failure, outcome),) = ranks(1, load_after_a_failure, tmp_path)
    assert "hidden_act='gelu'" in failure
    assert outcome == "loaded"


def test_norm_over_the_whole_projection_is_another_model() -> None:
    """Qwen3 normalizes each head; a norm over all heads (OLMo 2) has the same name and another shape."""
    config = config_from_hf(hf_config("qwen3").to_dict())
    source = {
        name: TensorInfo(shape, "float32")
        for entry in entries(config)
        for name, shape in zip(entry.hf, entry.mapping.hf_shapes(config), strict=True)
    }
    make_plan(config, source)
    name = "model.layers.0.self_attn.q_norm.weight"
    source[name] = TensorInfo((config.query_size,), "float32")
    with pytest.raises(ModelError, match=r"wrong shape: model\.layers\.0\.self_attn\.q_norm\.weight \[64\]"):
        make_plan(config, source)


def test_head_size_is_not_hidden_size_over_heads_where_the_config_says_so() -> None:
    """Mistral Nemo: 5120 / 32 is 160, the heads have 128."""
    nemo = {**BASES["mistral"], "hidden_size": 5120, "num_attention_heads": 32, "num_key_value_heads": 8}
    assert config_from_hf({**nemo, "head_dim": 128}).kv_channels == 128
    assert config_from_hf(nemo).kv_channels == 160


def test_biases_of_llama_are_part_of_its_weight_table() -> None:
    biased = config_from_hf({**BASE, "attention_bias": True, "mlp_bias": True})
    names = {name for entry in entries(biased) for name in entry.hf}
    for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        assert f"model.layers.0.{module}.bias" in names
    assert not any(name.endswith("bias") for entry in entries(config_from_hf(BASE)) for name in entry.hf)
