"""Stage *dataset*: rows of text become a validated, shuffled, optionally packed, memory-mapped token store."""

from typing import Literal

from pydantic import Field, PositiveInt

from tasks.section import Execution, Section


class DatasetConfig(Section):
    """What the model learns from, in LLaMA-Factory's formats."""

    files: list[str] = Field(default_factory=list)
    """Data files (json, jsonl, csv, parquet, txt), read in this order."""
    dataset_dir: str | None = None
    """Folder with a `dataset_info.json`, as an alternative to `files`."""
    names: list[str] = Field(default_factory=list)
    """Entries of `dataset_info.json` to use, in this order."""
    formatting: Literal["alpaca", "sharegpt", "text"] = "alpaca"
    """Layout of the rows of `files`; `text` is plain text for pretraining."""
    ranking: bool = False
    """Rows hold a chosen and a rejected answer."""
    columns: dict[str, str] = Field(default_factory=dict)
    """LLaMA-Factory's column map, for instance `{prompt: question, response: answer}`."""
    tags: dict[str, str] = Field(default_factory=dict)
    """LLaMA-Factory's role tags of sharegpt rows."""
    template: str | None = None
    """Chat template by LLaMA-Factory's name, for instance `qwen`; null for plain text."""
    cutoff_len: int = Field(default=1024, ge=8, le=2**20)
    """Longest training sequence, in tokens."""
    packing: bool = True
    """Put several documents into one sequence; they never see each other."""
    train_on_prompt: bool = False
    """Put loss on the prompt too."""
    mask_history: bool = False
    """Put loss on the last answer of a conversation only."""
    max_rows: PositiveInt | None = None
    """Use this many rows, drawn with `seed`."""
    eval_files: list[str] = Field(default_factory=list)
    """Files with held-out rows; without them, `eval_fraction` of the rows is held out."""
    eval_fraction: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Share of the rows that is held out for evaluation."""
    max_bad_fraction: float = Field(default=0.01, ge=0.0, le=1.0)
    """The stage fails when more than this share of the rows is unusable."""
    seed: int = Field(default=42, ge=0, lt=2**31)
    """Seed of the split, of the shuffle and of `max_rows`."""
    num_workers: Execution[PositiveInt] = 1
    """Processes that tokenize."""
