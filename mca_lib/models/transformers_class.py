"""Which class of transformers a model directory is loaded with. No torch at import."""

from pathlib import Path
from typing import Any

from mca_lib.models.config_files import read_hf_config


def auto_class(directory: str | Path) -> Any:
    """`AutoModelForCausalLM`, or for a model that sees images `AutoModelForImageTextToText`."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = "vision_config" in read_hf_config(directory)
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM
