"""Where a model directory says what the model is: `mca_config.json`, or Hugging Face's `config.json`. No torch."""

import json
from pathlib import Path
from typing import Any

from mca_lib.errors import ModelError

CONFIG_NAME = "mca_config.json"


def is_mca_checkpoint(directory: str | Path) -> bool:
    """Is this an MCA checkpoint directory (rather than a Hugging Face one)?"""
    return Path(directory, CONFIG_NAME).is_file()


def read_hf_config(directory: str | Path) -> dict[str, Any]:
    """The config.json of a Hugging Face model directory. Raises ModelError where there is none."""
    path = Path(directory, "config.json")
    if not path.is_file():
        raise ModelError(f"{directory}: neither {CONFIG_NAME} nor config.json; give the directory of a model")
    return read_json(path, ModelError)


def read_json(path: Path, error: type[Exception]) -> dict[str, Any]:
    """A JSON object from a file; `error` names the file when it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise error(f"{path}: not readable as JSON ({e})") from e
    if not isinstance(value, dict):
        raise error(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
