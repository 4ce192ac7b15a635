"""One way to load a model's tokenizer: from its directory alone, without code of its own."""

from pathlib import Path
from typing import Any

from mca_lib.errors import ModelError


def load_tokenizer(directory: str | Path) -> Any:
    """transformers' tokenizer of a directory. Raises ModelError, on one line, when there is none that loads."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the Rust tokenizers raise no narrower class for a damaged file
        detail = " ".join(str(error).split())
        raise ModelError(f"{directory}: no tokenizer can be loaded from it: {detail:.200}") from error
