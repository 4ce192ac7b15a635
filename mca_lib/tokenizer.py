"""One way to load a model's tokenizer: from its directory alone, without code of its own."""

import json
from pathlib import Path
from typing import Any

from mca_lib.errors import ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def load_tokenizer(directory: str | Path) -> Any:
    """transformers' tokenizer of a directory. Raises ModelError, on one line, when there is none that loads."""
    from transformers import AutoTokenizer

    folder = Path(directory)
    present = [folder / name for name in TOKENIZER_FILES if (folder / name).exists()]
    for path in present:
        _refuse_malformed(path)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any type: what the files hold is taken apart unchecked, and in Rust
        detail = f"{type(error).__name__}: {' '.join(str(error).split())}"
        missing = "" if folder / TOKENIZER_FILES[0] in present else f"there is no {TOKENIZER_FILES[0]}; "
        raise ModelError(f"{folder}: no tokenizer can be loaded from it: {missing}{detail:.200}") from None


def tokenizer_size(tokenizer: Any) -> int:
    """Rows that an embedding needs for the tokenizer: its highest id and one."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def file_vocabulary_size(directory: str | Path) -> int | None:
    """`tokenizer_size` by tokenizer.json alone, in milliseconds; None where there is none that can be read so."""
    try:
        content = json.loads((Path(directory) / TOKENIZER_FILES[0]).read_bytes())
        vocabulary = content["model"]["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))  # unigrams
        ids += [token["id"] for token in content.get("added_tokens") or ()]
        return max(ids, default=-1) + 1
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def file_token_id(directory: str | Path, token: str) -> int | None:
    """Id of a token that was added to the vocabulary, by tokenizer.json alone; None where that has none."""
    try:
        content = json.loads((Path(directory) / TOKENIZER_FILES[0]).read_bytes())
        return next((added["id"] for added in content["added_tokens"] if added["content"] == token), None)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def foreign_id(directory: str | Path, token_id: int, vocab_size: int) -> str:
    """The message for a tokenizer with an id that the model has no row for."""
    return (
        f"{directory}: the tokenizer gives id {token_id}, the vocabulary ends at {vocab_size - 1}; use the model's own "
        "tokenizer, or add rows with checkpoint.resize_vocabulary: true"
    )


def _refuse_malformed(path: Path) -> None:
    """Raise ModelError unless the file holds a JSON object."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error}); fetch the file again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: not a JSON object; fetch the file again")
