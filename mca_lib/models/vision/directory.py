"""Do the files of a model directory agree on what an image is? Asked before a run, by the files alone. No torch."""

import json
from pathlib import Path
from typing import Any

from mca_lib.errors import ConfigError, ModelError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.vision.towers import TOWERS
from mca_lib.tokenizer import file_token_id

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Where a model directory may say how images are prepared."""
PAD = "<|image_pad|>"
"""Stands in a text for each feature of an image."""


def check_images(config: McaModelConfig, directory: Path) -> None:
    """Can the model of this directory be given images?

    Raises:
        ConfigError: it is a model of text.
        ModelError: a file is missing or no JSON, or config.json has another token or other patches than the tokenizer
            and the image processor.
    """
    if config.vision is None:
        raise ConfigError(f"dataset.columns.images: {config.described} sees no images; leave it out")
    token_id = file_token_id(directory, PAD)
    if token_id is not None and token_id != config.vision.image_token_id:
        raise ModelError(
            f"{directory}: {PAD} is token {token_id} of the tokenizer, and image_token_id of config.json is "
            f"{config.vision.image_token_id}; use the files of one model"
        )
    path, values = processor_values(directory)
    sizes = TOWERS[config.model_type].read(config.vision.tower)
    # What transformers' image processor takes for a field that is not there.
    default = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    for (name, usual), own in zip(default.items(), (sizes.patch, sizes.temporal, sizes.merge), strict=True):
        if (given := values.get(name, usual)) != own:
            raise ModelError(f"{path}: {name}={given!r:.40}, and the tower of config.json has {own}")


def processor_values(directory: Path) -> tuple[Path, dict[str, Any]]:
    """The file that says how images are prepared, and what it says. Raises ModelError."""
    path = next((p for p in (directory / name for name in PROCESSOR_FILES) if p.is_file()), None)
    if path is None:
        raise ModelError(f"{directory}: no {PROCESSOR_FILES[0]}, so it is not known how images are prepared")
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error}); fetch the file again") from None
    values = content.get("image_processor", content) if isinstance(content, dict) else None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: not a JSON object; fetch the file again")
    return path, values
