"""Semantic digest of an MCA checkpoint: what it means, not how its files happen to be laid out.

    weights      BLAKE3 over [name, dtype, shape, BLAKE3 of the bytes] of every tensor, sorted by name
    config       BLAKE3 over mca_config.json in canonical form, without the fields that have their default
    tokenizer    BLAKE3 over name and bytes of the tokenizer's files and chat templates
    generation   the same for generation_config.json and licences
    digest       BLAKE3 over these parts

A checkpoint that a conversion wrote also holds what the digest of its weights is made of, in model/digest.json. It is
no part of the digest, and whoever reads tensors here or exports them compares. One that ranks wrote has no such file,
and is taken as it is.

A checkpoint written by eight ranks has the digest of the same weights written by one. One tensor is in memory at a
time.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import blake3
import torch

from mca_lib.checkpoint.reader import CheckpointReader
from mca_lib.checkpoint.side_files import side_files, tokenizer_files
from mca_lib.checkpoint.verify import WEIGHTS_FOLDER
from mca_lib.errors import CheckpointError
from mca_lib.models.config import CONFIG_NAME, McaModelConfig, is_mca_checkpoint, read_json

RECORD_NAME = "digest.json"
"""In the folder of the weights: {"weights": their digest, "tensors": the rows that it is made of}."""


def digest(spec: dict[str, Any], progress: Any) -> dict[str, Any]:
    """The job: {"checkpoint": directory} → {"digest", "parts"}."""
    return checkpoint_digest(spec["checkpoint"], progress)


def checkpoint_digest(directory: str | Path, progress: Any = None, *, weights: str | None = None) -> dict[str, Any]:
    """{"digest", "parts"} of an MCA checkpoint directory. Raises CheckpointError when it is not whole.

    Args:
        weights: their digest, where the writer has made it on the way; else they are read.
    """
    directory = Path(directory)
    if not is_mca_checkpoint(directory):
        raise CheckpointError(f"{directory}: no {CONFIG_NAME}; give the directory of an MCA checkpoint")
    config = McaModelConfig.from_pretrained(directory)
    tokenizer = tokenizer_files(directory)
    others = [p for p in side_files(directory) if p not in tokenizer]
    parts = {
        "weights": weights or weights_digest(directory / WEIGHTS_FOLDER, progress),
        "config": json_digest(config.meaning()),
        "tokenizer": files_digest(directory, tokenizer),
        "generation": files_digest(directory, others),
    }
    return {"digest": json_digest(parts), "parts": parts}


def weights_digest(directory: str | Path, progress: Any = None) -> str:
    """Digest of the tensors of a torch_dist checkpoint. Raises CheckpointError when one is not as it was recorded."""
    reader = CheckpointReader(directory)
    record = Record.read(directory)
    tensors = list(reader)
    rows = []
    for done, tensor in enumerate(tensors):
        rows.append(tensor_row(tensor.name, reader.read(tensor.name)))
        record.check(rows[-1])
        if progress is not None:
            progress(done + 1, len(tensors))
    return rows_digest(rows)


@dataclass(frozen=True)
class Record:
    """The rows of all tensors, as the writer of a checkpoint recorded them."""

    directory: Path
    rows: dict[str, list[Any]] | None
    """By name of the tensor; None: nothing was recorded."""

    @classmethod
    def read(cls, directory: str | Path) -> Self:
        """Raises CheckpointError when the record itself is damaged."""
        path = Path(directory) / RECORD_NAME
        if not path.is_file():
            return cls(Path(directory), None)
        found = read_json(path, CheckpointError)
        rows = found.get("tensors")
        if not isinstance(rows, list) or rows_digest(rows) != found.get("weights"):
            raise CheckpointError(f"{path}: is damaged; convert the model again")
        return cls(Path(directory), {row[0]: row for row in rows})

    def check(self, row: list[Any]) -> None:
        """Raise CheckpointError when a tensor has other bytes, another shape or another dtype than was recorded."""
        if self.rows is not None and self.rows.get(row[0]) != row:
            raise CheckpointError(
                f"{self.directory}: damaged checkpoint: {row[0]} is not what was written; convert the model again"
            )


def write_record(directory: Path, rows: Iterable[list[Any]]) -> None:
    """Record the rows of all tensors beside the weights."""
    rows = sorted(rows)
    text = json.dumps({"weights": rows_digest(rows), "tensors": rows}, separators=(",", ":"))
    (directory / RECORD_NAME).write_text(text + "\n", encoding="utf-8")


def tensor_row(name: str, tensor: torch.Tensor) -> list[Any]:
    """What the digest of the weights takes of a tensor."""
    return [name, str(tensor.dtype), list(tensor.shape), tensor_digest(tensor)]


def rows_digest(rows: Iterable[list[Any]]) -> str:
    """Digest of the weights from the rows of all tensors, in any order."""
    return json_digest(sorted(rows))


def tensor_digest(tensor: torch.Tensor) -> str:
    """BLAKE3 of a tensor's bytes."""
    return blake3.blake3(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()


def json_digest(value: object) -> str:
    """BLAKE3 of canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return blake3.blake3(text.encode()).hexdigest()


def files_digest(directory: Path, files: list[Path]) -> str:
    """BLAKE3 over names and bytes; `files` are relative to the directory."""
    return json_digest([[str(f), blake3.blake3((directory / f).read_bytes()).hexdigest()] for f in files])
