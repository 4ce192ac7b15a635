"""What the files of a model directory say of images is compared before a run."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mca_lib.errors import ConfigError, ModelError
from mca_lib.models.registry import config_from_hf
from mca_lib.models.training_rules import check_adapters_alone
from mca_lib.models.vision.directory import check_images
from mca_lib.verification.tiny import tiny_config

CONFIG = config_from_hf(tiny_config("qwen3_vl"))
PAD = {"id": CONFIG.vision.image_token_id, "content": "<|image_pad|>"}
PATCHES = {"patch_size": CONFIG.vision.tower["patch_size"]}


def write(directory: Path, token: dict[str, Any], name: str, content: Any) -> None:
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}, "added_tokens": [token]}))
    (directory / name).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "content"),
    [("preprocessor_config.json", PATCHES), ("processor_config.json", {"image_processor": PATCHES})],
)
def test_files_of_one_model_are_accepted(tmp_path: Path, name: str, content: dict[str, Any]) -> None:
    write(tmp_path, PAD, name, content)
    check_images(CONFIG, tmp_path)


@pytest.mark.parametrize(
    ("token", "name", "content", "said"),
    [
        (
            PAD | {"id": 5},
            "preprocessor_config.json",
            PATCHES,
            r"<\|image_pad\|> is token 5 of the tokenizer, and image",
        ),
        (
            PAD,
            "preprocessor_config.json",
            {"patch_size": 99},
            r"preprocessor_config\.json: patch_size=99, and the tower",
        ),
        (PAD, "preprocessor_config.json", [], r"preprocessor_config\.json: not a JSON object"),
        (PAD, "other.json", PATCHES, r"no preprocessor_config\.json"),
    ],
)
def test_files_of_two_models_are_refused(
    tmp_path: Path, token: dict[str, Any], name: str, content: Any, said: str
) -> None:
    write(tmp_path, token, name, content)
    with pytest.raises(ModelError, match=said):
        check_images(CONFIG, tmp_path)


def test_a_model_of_text_sees_no_images(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"columns\.images: a llama model sees no images"):
        check_images(config_from_hf(tiny_config("llama")), tmp_path)


def test_a_tower_that_lora_would_not_train_is_named() -> None:
    options = SimpleNamespace(freeze_vision_tower=True, freeze_multi_modal_projector=True)
    check_adapters_alone(CONFIG, options)
    options.freeze_multi_modal_projector = False
    with pytest.raises(ConfigError, match=r"training\.freeze_multi_modal_projector=false: LoRA adapts the language"):
        check_adapters_alone(CONFIG, options)
