"""Files that travel with the weights so that a checkpoint is self-sufficient: tokenizer, template, generation."""

import shutil
from pathlib import Path

TOKENIZER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "*.model",
    "*.model.v*",
    "*.tiktoken",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
"""Glob patterns: the files that `tasks.model_files` pins, and no others, so that only pinned bytes travel."""

GENERATION_CONFIG = "generation_config.json"
LICENCES = ("LICENSE*", "NOTICE*", "USE_POLICY*")


def tokenizer_files(directory: Path) -> list[Path]:
    """The tokenizer's files and chat templates, relative to the directory, sorted."""
    return _found(directory, TOKENIZER_FILES)


def side_files(directory: Path) -> list[Path]:
    """All files that travel with the weights, relative to the directory, sorted."""
    return _found(directory, (*TOKENIZER_FILES, GENERATION_CONFIG, *LICENCES))


def copy_side_files(source: str | Path, destination: str | Path) -> list[str]:
    """Copy them, overwriting; returns their names."""
    return _copy(Path(source), Path(destination), side_files(Path(source)))


def copy_tokenizer(source: str | Path, destination: str | Path) -> list[str]:
    """Copy the tokenizer's files and chat templates alone, overwriting; returns their names."""
    return _copy(Path(source), Path(destination), tokenizer_files(Path(source)))


def _copy(source: Path, destination: Path, names: list[Path]) -> list[str]:
    for name in names:
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target)
    return [str(n) for n in names]


def _found(directory: Path, patterns: tuple[str, ...]) -> list[Path]:
    found = {p.relative_to(directory) for pattern in patterns for p in directory.glob(pattern) if p.is_file()}
    return sorted(found)
