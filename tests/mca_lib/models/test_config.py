"""mca_config.json: written and read exactly, unknown keys refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from mca_lib.errors import CheckpointError, ConfigError, ModelError
from mca_lib.models.config import CONFIG_NAME, Llama3Rope, McaModelConfig, is_mca_checkpoint
from mca_lib.models.registry import config_from_hf
from tests.mca_lib.models.test_registry import BASE, BASES

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}

CONFIG = McaModelConfig(
    model_type="llama",
    num_layers=2,
    hidden_size=48,
    ffn_hidden_size=96,
    num_attention_heads=6,
    num_query_groups=2,
    kv_channels=8,
    vocab_size=100,
    max_position_embeddings=64,
    rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 32),
    source_dtype="bfloat16",
    source_dtype_exceptions={"model.norm.weight": "float32"},
    hf_config={**BASE, "unknown": {"nested": ["ü", None]}},
)


def test_config_survives_the_disk(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path)
    assert is_mca_checkpoint(tmp_path)
    assert McaModelConfig.from_pretrained(tmp_path) == CONFIG


def test_unknown_key_gets_the_nearest_known_one(tmp_path: Path) -> None:
    (tmp_path / CONFIG_NAME).write_text(json.dumps({**CONFIG.to_dict(), "num_layer": 3}))
    with pytest.raises(ConfigError, match="unknown key 'num_layer'; did you mean 'num_layers'"):
        McaModelConfig.from_pretrained(tmp_path)


def test_missing_key_is_named(tmp_path: Path) -> None:
    values = CONFIG.to_dict()
    del values["hidden_size"]
    (tmp_path / CONFIG_NAME).write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="missing key hidden_size"):
        McaModelConfig.from_pretrained(tmp_path)


def test_config_of_another_format_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / CONFIG_NAME).write_text(json.dumps({**CONFIG.to_dict(), "format_version": 99}))
    with pytest.raises(ConfigError, match="format_version 99"):
        McaModelConfig.from_pretrained(tmp_path)


def test_config_without_a_format_version_is_refused() -> None:
    values = CONFIG.to_dict()
    del values["format_version"]
    with pytest.raises(ConfigError, match="format_version None"):
        McaModelConfig.from_dict(values)


DEEPSEEK = config_from_hf({**BASES["deepseek_v3"], "rope_scaling": YARN})
WRONG = [
    (CONFIG, "norm_epsilon", "1e-5", "norm_epsilon='1e-5' cannot be used; it must be a number"),
    (CONFIG, "norm_epsilon", None, "norm_epsilon=null"),
    (CONFIG, "norm_epsilon", 0.0, "rms_norm_eps=0.0"),
    (CONFIG, "rotary_base", "x", "rotary_base='x'"),
    (CONFIG, "num_layers", 2.0, "num_layers=2.0 cannot be used; it must be an integer"),
    (CONFIG, "qkv_bias", 1, "qkv_bias=1 cannot be used; it must be true or false"),
    (CONFIG, "rope_scaling.factor", "2", "rope_scaling: factor='2'"),
    (CONFIG, "rope_scaling.factor", 0, "factor=0"),
    (CONFIG, "rope_scaling.rope_type", ["linear"], r"rope_type \['linear'\] is not one of"),
    (CONFIG, "rope_scaling", [], "rope_scaling must be an object"),
    (CONFIG, "source_dtype", "int8", "source_dtype='int8' cannot be used; it must be one of float32, bfloat16"),
    (CONFIG, "source_dtype_exceptions", [], r"source_dtype_exceptions=\[\]"),
    (CONFIG, "source_dtype_exceptions", {"model.norm.weight": "int8"}, "source_dtype_exceptions="),
    (CONFIG, "source_copies", ["xx"], "source_copies: 'xx'"),
    (CONFIG, "source_copies", "xx", "source_copies='xx' cannot be used; it must be a list, each a text"),
    (CONFIG, "hf_config", "x", "hf_config='x' cannot be used; it must be an object"),
    (CONFIG, "model_type", "qwen2", "model_type='qwen2' and hf_config.model_type='llama' differ"),
    (CONFIG, "model_type", "gpt2", "model_type='gpt2' is not supported"),
    (CONFIG, "model_type", 3, "model_type=3"),
    (CONFIG, "qk_layernorm", True, "qk_layernorm=True is not possible for model type 'llama'"),
    (CONFIG, "mtp_num_layers", 1, "mtp_num_layers=1 is not possible for model type 'llama'"),
    (CONFIG, "num_query_groups", 4, "6 attention heads do not divide into 4"),
    (CONFIG, "moe", [], "moe must be an object"),
    (CONFIG, "moe", DEEPSEEK.to_dict()["moe"], "moe.* is not possible for model type 'llama'"),
    (DEEPSEEK, "moe", None, "moe is missing, which model type 'deepseek_v3' has"),
    (DEEPSEEK, "moe.score_function", "tanh", "moe: score_function='tanh' .* one of softmax, sigmoid"),
    (DEEPSEEK, "moe.layers", [1.5], r"moe: layers=\[1.5\]"),
    (DEEPSEEK, "latent_attention.norm_epsilon", "x", "latent_attention: norm_epsilon='x'"),
]


@pytest.mark.parametrize(("config", "key", "value", "message"), WRONG)
def test_value_that_cannot_be_is_named_on_one_line(config: McaModelConfig, key: str, value: Any, message: str) -> None:
    values = config.to_dict()
    *parts, name = key.split(".")
    (values[parts[0]] if parts else values)[name] = value
    with pytest.raises(ConfigError, match=f"^here: .*{message}") as error:
        McaModelConfig.from_dict(values, where="here")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model_type", BASES)
def test_config_of_every_family_survives_json(model_type: str) -> None:
    config = config_from_hf(BASES[model_type])
    assert McaModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    meaning = config.meaning()
    assert McaModelConfig.from_dict(meaning) == config
    # Neutral by default, as a field of a later version will be: it must not change the digest of a model without it.
    assert ("residual_dropout" in meaning) == (config.residual_dropout != 0)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_damaged_config_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / CONFIG_NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=CONFIG_NAME):
        McaModelConfig.from_pretrained(tmp_path)


def test_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        McaModelConfig.from_pretrained(tmp_path)


def test_hugging_face_directory_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    config = McaModelConfig.from_pretrained(tmp_path)
    assert (config.model_type, config.num_query_groups, config.hf_config) == ("llama", 2, BASE)


def test_heads_that_do_not_divide_into_groups_are_refused() -> None:
    import dataclasses

    with pytest.raises(ModelError, match="6 attention heads do not divide into 4"):
        dataclasses.replace(CONFIG, num_query_groups=4)
