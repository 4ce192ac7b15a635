"""A tokenizer directory, and a way to run the `dataset` job in this process."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mca_lib.data.spec import DatasetSpec
from mca_lib.data.token_store import TokenStore
from mca_lib.tiny_models import make_tokenizer

VOCAB_SIZE = 1024


def alpaca_rows(n: int) -> list[dict[str, str]]:
    """n different rows of different lengths."""
    return [
        {
            "instruction": f"Count to {i} by threes.",
            "input": "Please." * (i % 3),
            "output": " ".join(str(k) for k in range(0, 3 + i % 37, 3)) + f", done {i}",
        }
        for i in range(n)
    ]


def write_json(path: Path, rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    return path


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def section(*files: Path, **fields: Any) -> DatasetSpec:
    """A dataset section that reads `files`."""
    return DatasetSpec(**{"files": [str(file) for file in files], "template": "chatml", **fields})


@dataclass(frozen=True)
class Built:
    """What one run of the job left."""

    spec: dict[str, Any]
    output: Path
    result: dict[str, Any]
    progress: list[tuple[int, int]]

    @property
    def stats(self) -> dict[str, Any]:
        return self.result["stats"]

    def store(self, split: str = "train") -> TokenStore:
        return TokenStore.open(self.output / split)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory) -> Path:
    """A ChatML tokenizer: ids 0 to 2 are <|endoftext|>, <|im_start|>, <|im_end|>."""
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def tokenizer(tokenizer_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_dir)


@pytest.fixture
def build(tmp_path, tokenizer_dir):
    """`build(files or rows, **spec)` runs the job; each call writes to a folder of its own."""
    from mca_lib.data.prepare import dataset

    count = 0

    def run(data: list[Any], **fields: Any) -> Built:
        nonlocal count
        count += 1
        output = tmp_path / f"out{count}"
        files = data if isinstance(data[0], Path) else [write_json(tmp_path / f"rows{count}.json", data)]
        spec = {
            "files": [str(file) for file in files],
            "template": "chatml",
            "cutoff_len": 256,
            "eval_fraction": 0.0,
            "objective": "sft",
            "tokenizer_dir": str(tokenizer_dir),
            "vocab_size": VOCAB_SIZE,
            "output": str(output),
            **fields,
        }
        progress: list[tuple[int, int]] = []
        result = dataset(spec, lambda done, total, **_: progress.append((done, total)))
        return Built(spec, output, result, progress)

    return run
