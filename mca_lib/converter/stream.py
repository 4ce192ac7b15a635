"""Hugging Face directory → MCA checkpoint, tensor by tensor: no Megatron, no model in memory, on CPU alone.

    headers ──> plan ──> for each tensor: bring its slices · read them back · check · digest ──> config ──> rename

Each worker holds one tensor. Nothing is at `output` before all of it is right.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from mca_lib.checkpoint.digest import checkpoint_digest, rows_digest, tensor_row, weights_digest, write_record
from mca_lib.checkpoint.publish import published
from mca_lib.checkpoint.side_files import copy_side_files
from mca_lib.checkpoint.verify import WEIGHTS_FOLDER, expected_shapes
from mca_lib.checkpoint.writer import Piece, write_checkpoint
from mca_lib.converter.file_tensor import SMALLEST_COPY, Content, FileTensor
from mca_lib.converter.hf_source import HfSource
from mca_lib.converter.model_converter import ModelConverter, Progress, no_progress
from mca_lib.converter.plan import Plan, stored_entries
from mca_lib.converter.translation import FreshTensors, Translation
from mca_lib.converter.unchanged import Stamps
from mca_lib.converter.workers import WORKERS, Scratch, one_thread_per_operation
from mca_lib.errors import CheckpointError, ModelError
from mca_lib.models.config import McaModelConfig, is_mca_checkpoint
from mca_lib.models.naming import stored_key

type Check = Callable[[Path, Plan], dict[str, Any]]


def convert_hf(
    source: str | Path,
    output: str | Path,
    *,
    check: Check | None = None,
    read_back: bool = False,
    extra_rows: Mapping[str, torch.Tensor] | None = None,
    stamps: Stamps | None = None,
    translation: Translation | None = None,
    workers: int = WORKERS,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Convert a Hugging Face directory; `output` appears when everything is written and checked.

    Args:
        output: absent or an empty folder.
        check: gets the folder with the whole checkpoint and the plan before it is published; what it raises ends the
            conversion, what it returns is added to the result.
        read_back: read what was written and compare its digest; for a checkpoint that no `check` loads.
        stamps: of the source, where the caller has read of it already.
        extra_rows: name in the checkpoint (embedding, output layer) → rows to append, for a larger vocabulary.
        translation: makes a hybrid of the transformer.

    Returns:
        {"digest", "parts", "parameters", "dtype", "tensors", "bytes", "bytes_read"} and what `check` returns

    Raises:
        ModelError: the model is unsupported, damaged or inconsistent, a weight is not a finite number, or a file of the
            model changed meanwhile.
        ConfigError: `output` is there, or the transformer cannot become that hybrid.
        CheckpointError: what was read back is not what was written.
    """
    source, output = Path(source), Path(output)
    if is_mca_checkpoint(source):
        raise ModelError(f"{source}: already an MCA checkpoint; give the directory of a Hugging Face model")
    stamps = stamps or Stamps.of(source)
    config = McaModelConfig.from_pretrained(source)
    if translation is not None:
        config = translation.config(config)
    with HfSource(source) as hf, published(output) as folder:
        plan = ModelConverter(config).plan(hf.tensors)
        config = plan.config(config)
        stream = _Stream(config, plan, hf, dict(extra_rows or {}), translation)
        rows = stream.write(folder / WEIGHTS_FOLDER, workers, progress)
        weights = rows_digest(rows)
        if read_back and weights_digest(folder / WEIGHTS_FOLDER) != weights:
            raise CheckpointError(f"{output}: what was read back is not what was written; check disk and memory")
        write_record(folder / WEIGHTS_FOLDER, rows)
        copy_side_files(source, folder)
        stream.target_config.save_pretrained(folder)
        result = {
            **checkpoint_digest(folder, weights=weights),
            "parameters": sum(prod(p.shape) for p in stream.pieces),
            "dtype": plan.dtype,
            "tensors": len(stream.pieces),
            "bytes": sum(p.bytes for p in stream.pieces),
            "bytes_read": hf.bytes_read,
        }
        if check is not None:
            result |= check(folder, plan)
        stamps.check()
    return result


class _Stream:
    """The tensors of one conversion, made one at a time by each worker."""

    def __init__(
        self,
        config: McaModelConfig,
        plan: Plan,
        source: HfSource,
        extra_rows: dict[str, torch.Tensor],
        translation: Translation | None,
    ) -> None:
        self.plan = plan
        self.source = source
        self.extra_rows = extra_rows
        self.converter = ModelConverter(config)
        added = {len(rows) for rows in extra_rows.values()} or {0}
        self.target_config = replace(config, vocab_size=config.vocab_size + added.pop())
        self.fresh = None if translation is None else FreshTensors(translation, config, plan)
        self.entries = {stored.mca: stored for e in plan.entries for stored in stored_entries(e, config)}
        dtypes = {name: source.dtype(entry.hf[0]) for name, entry in self.entries.items()}
        if self.fresh is not None:
            dtypes |= {name: self.fresh.dtype(name) for name in self.fresh.entries}
        shapes = expected_shapes(self.target_config)
        self.pieces = []
        for name, dtype in dtypes.items():
            key, index = stored_key(name, config.stacked_layers)
            self.pieces.append(Piece(name, key, index, shapes[key], dtype))
        self._scratch = Scratch(max(piece.bytes for piece in self.pieces))

    def write(self, directory: Path, workers: int, progress: Progress) -> list[list[Any]]:
        """Write all tensors; returns the rows of their digest."""
        rows: list[list[Any]] = []
        lock = threading.Lock()

        def written(piece: Piece, stored: FileTensor) -> None:
            value = self._scratch.tensor(piece.shape, piece.dtype)
            stored.read_into(value, ())
            if piece.name in self.entries:
                self.converter.check(self.entries[piece.name], self.source, self.plan, value)
            row = tensor_row(piece.name, value)
            with lock:
                rows.append(row)
                progress(len(rows), len(self.pieces))

        with one_thread_per_operation():
            write_checkpoint(directory, self.pieces, self._make, workers=workers, written=written)
        return rows

    def _make(self, piece: Piece) -> Content:
        if piece.name not in self.entries:
            return self.fresh.read(piece.name)
        entry, extra = self.entries[piece.name], self.extra_rows.get(piece.name)
        if extra is None:
            runs = entry.mapping.runs([self.source.slice(name) for name in entry.hf], self.converter.config)
            if runs is not None and piece.bytes >= len(runs) * SMALLEST_COPY:
                return runs
        value = self._scratch.tensor(piece.shape, piece.dtype)
        own = value if extra is None else value[: len(value) - len(extra)]
        if extra is not None:
            value[len(own) :] = extra
        self.converter.read(entry, self.source, self.plan, own)
        return value
