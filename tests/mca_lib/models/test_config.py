"""mca_config.json: written and read exactly, unknown keys refused."""

import json
from pathlib import Path

import pytest

from mca_lib.errors import CheckpointError, ConfigError, ModelError
from mca_lib.models.config import CONFIG_NAME, Llama3Rope, McaModelConfig, is_mca_checkpoint
from tests.mca_lib.models.test_registry import BASE

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
