"""What the `dataset` job is asked for: the recipe's dataset section, the tokenizer, and where to write."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from mca_lib.data.suggest import suggestion
from mca_lib.errors import ConfigError

OBJECTIVES = ("pt", "sft", "dpo")
TOKENIZING_LIBRARIES = ("transformers", "tokenizers", "llamafactory")
"""Their releases decide the tokens, so they are in the key of the stage and in meta.json."""
EXECUTOR: dict[str, Any] = {
    "kind": "local",
    "partition": None,
    "qos": None,
    "time": "24:00:00",
    "mem_per_cpu_gb": 4,
    "sbatch_args": {},
}
"""Defaults of `tasks.dataset.ExecutorConfig`."""


@dataclass(frozen=True)
class DatasetSpec:
    """Fields of `tasks.dataset.DatasetConfig`, described there, and the job's own at the end."""

    files: list[str] = field(default_factory=list)
    dataset_dir: str | None = None
    names: list[str] = field(default_factory=list)
    formatting: str = "alpaca"
    ranking: bool = False
    columns: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    template: str | None = None
    default_system: str | None = None
    enable_thinking: bool | None = True
    cutoff_len: int = 1024
    packing: bool = True
    storage: str = "auto"
    blend: dict[str, float] = field(default_factory=dict)
    media_dir: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    train_on_prompt: bool = False
    mask_history: bool = False
    max_rows: int | None = None
    eval_files: list[str] = field(default_factory=list)
    eval_fraction: float = 0.05
    max_bad_fraction: float = 0.01
    seed: int = 42
    num_workers: int = 1
    executor: dict[str, Any] = field(default_factory=lambda: dict(EXECUTOR))
    objective: str = "sft"
    """`pt`, `sft` or `dpo`, as `training.stage`."""
    tokenizer_dir: str = ""
    """Directory in Hugging Face format that holds the tokenizer."""
    vocab_size: int = 0
    """Of the model: every token id must be below."""
    resize_vocabulary: bool = False
    """The model gets rows for the tokenizer's further tokens."""
    output: str = ""
    """Folder to write to, created if missing."""
    work: str = ""
    """Folder in which a killed tokenization finds what it had done; one in `output` without it."""
    file_digests: dict[str, str] = field(default_factory=dict)
    """Path of a corpus that stays where it is -> digest of its two files, so that it isn't read for that again."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DatasetSpec":
        """Check the keys and the job's own fields. Raises ConfigError."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(f"dataset: unknown field {key!r}{suggestion(key, known)}")
        spec = cls(**values)
        for name in ("tokenizer_dir", "vocab_size", "output"):
            if not getattr(spec, name):
                raise ConfigError(f"dataset: {name} is missing")
        if spec.objective not in OBJECTIVES:
            raise ConfigError(f"dataset: unknown objective {spec.objective!r}{suggestion(spec.objective, OBJECTIVES)}")
        return spec
