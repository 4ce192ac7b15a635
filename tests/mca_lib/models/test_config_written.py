"""The config.json of an export is that of the model: what was changed is written, and what cannot be is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mca_lib.errors import ModelError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.registry import FAMILIES, check_config, config_from_hf
from tests.mca_lib.models.test_registry import BASES

Change = Callable[[McaModelConfig], McaModelConfig]


def of(**changes: Any) -> Change:
    """Changes of the config; those of a part under `part__field`."""

    def change(config: McaModelConfig) -> McaModelConfig:
        for name, value in changes.items():
            part, _, field = name.partition("__")
            value = replace(getattr(config, part), **{field: value}) if field else value
            config = replace(config, **{part: value})
        return config

    return change


IMPOSSIBLE = [
    ("llama", of(qk_layernorm=True), "qk_layernorm=True"),
    ("llama", of(qkv_bias=True), "attention_output_bias=False"),
    ("llama", of(attention_output_bias=True), "attention_output_bias=True"),
    ("llama", of(mtp_num_layers=1), "mtp_num_layers=1"),
    ("llama", of(sliding_window=8), "sliding_window=8"),
    ("qwen2", of(qkv_bias=False), "qkv_bias=False"),
    ("qwen2", of(mlp_bias=True), "mlp_bias=True"),
    ("qwen3", of(qk_layernorm=False), "qk_layernorm=False"),
    ("mixtral", of(moe__normalize_topk=False), "moe.normalize_topk=False"),
    ("mixtral", of(moe__scaling_factor=2.0), "moe.scaling_factor=2.0"),
    ("mixtral", of(moe__layers=(0, 2)), r"moe.layers=\(0, 2\)"),
    ("mixtral", of(moe__ffn_hidden_size=32), "ffn_hidden_size=96"),
    ("qwen2_moe", of(moe__shared_gate=False), "moe.shared_gate=False"),
    ("qwen3_moe", of(moe__layers=(0, 2)), r"moe.layers=\(0, 2\)"),
    ("qwen3_moe", of(moe__shared_ffn_hidden_size=8), "moe.shared_ffn_hidden_size=8"),
    ("deepseek_v3", of(moe__layers=(2,)), r"moe.layers=\(2,\)"),
    ("deepseek_v3", of(moe__shared_ffn_hidden_size=24), "moe.shared_ffn_hidden_size=24"),
    ("deepseek_v3", of(moe__normalize_topk=False), "moe.normalize_topk=False"),
    ("deepseek_v3", of(moe__score_function="softmax"), "moe.score_function='softmax'"),
    ("deepseek_v3", of(moe__expert_bias=False), "moe.expert_bias=False"),
    ("deepseek_v3", of(latent_attention__norm_epsilon=1e-2), "latent_attention.norm_epsilon=0.01"),
    ("deepseek_v3", of(kv_channels=64), "kv_channels=64"),
    ("deepseek_v3", of(latent_attention=None), "latent_attention is missing"),
    ("deepseek_v3", of(moe=None), "moe is missing"),
    ("llama", of(model_type="qwen2"), "model_type='qwen2' and hf_config.model_type='llama' differ"),
]


@pytest.mark.parametrize(("model_type", "change", "message"), IMPOSSIBLE)
def test_value_that_the_family_cannot_have_is_refused_by_name(model_type: str, change: Change, message: str) -> None:
    config = change(config_from_hf(BASES[model_type]))
    with pytest.raises(ModelError, match=f"model config: .*{message}") as error:
        check_config(config)
    assert "\n" not in str(error.value)


def test_model_that_its_config_json_could_not_describe_is_not_built() -> None:
    from mca_lib.models.transformer_config import transformer_config

    config = config_from_hf(BASES["deepseek_v3"])
    transformer_config(config)
    with pytest.raises(ModelError, match=r"moe\.normalize_topk=False"):
        transformer_config(of(moe__normalize_topk=False)(config))


@pytest.mark.parametrize("model_type", BASES)
def test_megatron_takes_the_config_of_every_family_on_a_gpu(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from mca_lib.models import transformer_config
    from mca_lib.platforms import Platform

    gpu = Platform("cuda", "nccl", torch.device("cuda"))
    monkeypatch.setattr(transformer_config, "current_platform", lambda: gpu)
    built = transformer_config.transformer_config(config_from_hf(BASES[model_type]))
    assert not built.use_cpu_initialization


POSSIBLE = [
    ("llama", of(num_layers=2, num_query_groups=3, norm_epsilon=1e-3)),
    ("llama", of(qkv_bias=True, attention_output_bias=True, mlp_bias=True, kv_channels=10)),
    ("qwen2", of(sliding_window=5, full_attention_layers=(1,))),
    ("qwen2_moe", of(qkv_bias=False, moe__normalize_topk=True, moe__topk=3)),
    ("mixtral", of(ffn_hidden_size=32, moe__ffn_hidden_size=32, sliding_window=9)),
    ("deepseek_v3", of(moe__scaling_factor=1.5, mtp_num_layers=0, latent_attention__q_lora_rank=None)),
]


@pytest.mark.parametrize(("model_type", "change"), POSSIBLE)
@pytest.mark.parametrize("keeps_source", [True, False])
def test_changed_config_is_written(model_type: str, change: Change, keeps_source: bool) -> None:
    config = change(config_from_hf(BASES[model_type]))
    config = config if keeps_source else replace(config, hf_config={})
    hf = FAMILIES[model_type].config_to_hf(config)
    assert replace(config_from_hf(hf), hf_config=config.hf_config) == config


@pytest.mark.parametrize("model_type", BASES)
def test_config_made_by_hand_is_written_as_transformers_reads_it(model_type: str) -> None:
    from transformers import AutoConfig

    config = replace(config_from_hf(BASES[model_type]), hf_config={})
    hf = FAMILIES[model_type].config_to_hf(config, transformers=5)
    assert hf["architectures"] == [FAMILIES[model_type].architecture]
    theirs = AutoConfig.for_model(**hf)
    assert theirs.model_type == model_type
    assert replace(config_from_hf(theirs.to_dict()), hf_config={}) == config
