"""MCA checkpoint → Hugging Face directory, in one process; each worker holds one fused tensor.

Shards are written while tensors are read, into a folder beside `output` that takes its name when all of it is there.
"""

import importlib.metadata
import json
import threading
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch

from mca_lib.adapters.peft_files import Adapter
from mca_lib.checkpoint.digest import Record, tensor_row
from mca_lib.checkpoint.publish import published
from mca_lib.checkpoint.reader import CheckpointReader
from mca_lib.checkpoint.side_files import copy_side_files
from mca_lib.checkpoint.verify import WEIGHTS_FOLDER, verify_model
from mca_lib.converter.casts import cast
from mca_lib.converter.file_tensor import SMALLEST_COPY, Content
from mca_lib.converter.model_converter import ModelConverter, Progress, no_progress
from mca_lib.converter.plan import FLOAT_DTYPES, Entry, entries
from mca_lib.converter.remote_files import copy_code
from mca_lib.converter.safetensors_writer import ShardedWriter, Slot, parse_size
from mca_lib.converter.stacked import part_names, stacked_shapes, whole
from mca_lib.converter.workers import WORKERS, Scratch, for_each
from mca_lib.errors import CheckpointError, ConfigError
from mca_lib.models.config import CONFIG_NAME, McaModelConfig, is_mca_checkpoint
from mca_lib.models.families import mcaflow_hybrid
from mca_lib.models.registry import weights_family


def export_hf(
    checkpoint: str | Path,
    output: str | Path,
    *,
    dtype: str = "auto",
    max_shard_size: str = "5GB",
    adapter: Adapter | None = None,
    replace: bool = False,
    workers: int = WORKERS,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Write weights, config.json, tokenizer, chat template and generation config; transformers loads the result.

    Args:
        output: absent or an empty folder.
        dtype: `auto` gives every tensor the dtype that it had in the source.
        adapter: is merged into the weights, in fp32 before they are cast.
        replace: what is at `output` is replaced as a whole.

    Returns:
        {"parameters", "bytes", "files", "dtype"}

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model than its config says. Bytes are compared with
            what a conversion recorded; a checkpoint that ranks wrote has no record, and is taken as it is.
        ConfigError: `output` is there, an option is wrong, or a weight is too large for `dtype`.
    """
    checkpoint, output = Path(checkpoint), Path(output)
    if not is_mca_checkpoint(checkpoint):
        raise CheckpointError(f"{checkpoint}: no {CONFIG_NAME}; give the directory of an MCA checkpoint")
    config = McaModelConfig.from_pretrained(checkpoint)
    hf_config(config, "float32")  # refuses what no config.json can say, before weights are read
    reader = verify_model(checkpoint / WEIGHTS_FOLDER, config)
    slots = hf_slots(config, dtype)
    shard_bytes = parse_size(max_shard_size)
    main_dtype = config.source_dtype if dtype == "auto" else dtype
    parts = part_names({n: slot.shape for n, slot in slots.items()}, (n for e in entries(config) for n in e.hf))
    with published(output, replace=replace) as folder:
        with ShardedWriter(folder, slots, shard_bytes, parts) as writer:
            _write(config, reader, writer, adapter, workers, progress)
        files = copy_side_files(checkpoint, folder)
        hf = hf_config(config, main_dtype)
        (folder / "config.json").write_text(json.dumps(hf, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        code = copy_code(folder) if hf["model_type"] == mcaflow_hybrid.MODEL_TYPE else []
        weights = sorted(p.name for p in folder.glob("*.safetensors*"))
    return {
        "parameters": writer.total_parameters,
        "bytes": writer.total_bytes,
        "files": sorted([*files, *code, "config.json", *weights]),
        "dtype": main_dtype,
    }


def _write(
    config: McaModelConfig,
    reader: CheckpointReader,
    writer: ShardedWriter,
    adapter: Adapter | None,
    workers: int,
    progress: Progress,
) -> None:
    converter = ModelConverter(config)
    dtypes = {name: slot.dtype for name, slot in writer.slots.items()}
    adapted = set() if adapter is None else adapter.weights
    dtypes |= dict.fromkeys(adapted, torch.float32)
    record = Record.read(reader.directory)
    stored = {tensor.name: tensor for tensor in reader}
    scratch = Scratch(max(prod(e.mapping.local_shape(config, 0, 1)) * 4 for e in entries(config)))
    lock, done = threading.Lock(), 0

    def contents(entry: Entry) -> Iterable[tuple[str, Content]]:
        parts = [entry.mca + suffix for suffix, _ in entry.mapping.stored_parts(config)]
        if len(parts) > 1:
            value = scratch.tensor(entry.mapping.local_shape(config, 0, 1), stored[parts[0]].dtype)
            for part, rows in zip(parts, value.split([stored[part].shape[0] for part in parts]), strict=True):
                reader.read_into(part, rows)
                record.check(tensor_row(part, rows))
            return converter.to_hf(entry, value, dtypes)
        where = stored[entry.mca]
        value = None
        if record.rows is not None:
            value = scratch.tensor(where.shape, where.dtype)
            reader.read_into(entry.mca, value)
            record.check(tensor_row(entry.mca, value))
        piece = reader.in_one_piece(entry.mca) if where.bytes >= SMALLEST_COPY else None
        named = converter.hf_runs(entry, piece) if piece is not None else None
        if named and all(dtypes[whole(name)] == where.dtype and name not in adapted for name, _ in named):
            return named
        if value is None:
            value = scratch.tensor(where.shape, where.dtype)
            reader.read_into(entry.mca, value)
        return converter.to_hf(entry, value, dtypes)

    def export_entry(entry: Entry) -> None:
        nonlocal done
        for name, content in contents(entry):
            if name in adapted:
                content = cast(name, adapter.merged(name, content), writer.slots[name].dtype)
            writer.write(name, content)
            with lock:
                done += 1
                progress(done, writer.pieces)

    for_each(entries(config), export_entry, workers)


def hf_slots(config: McaModelConfig, dtype: str) -> dict[str, Slot]:
    """Name → shape and dtype of every tensor of the Hugging Face side, in the order of the weight table."""
    if dtype != "auto" and dtype not in FLOAT_DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not one of auto, {', '.join(FLOAT_DTYPES)}")
    shapes = {n: s for e in entries(config) for n, s in zip(e.hf, e.mapping.hf_shapes(config), strict=True)}
    shapes = stacked_shapes(shapes)
    copies = weights_family(config).copies_of(config)
    shapes |= {name: shapes[copies[name]] for name in config.source_copies}
    exceptions = config.source_dtype_exceptions if dtype == "auto" else {}
    main = config.source_dtype if dtype == "auto" else dtype
    return {name: Slot(shape, getattr(torch, exceptions.get(name, main))) for name, shape in shapes.items()}


def hf_config(config: McaModelConfig, dtype: str) -> dict[str, Any]:
    """The source's config.json with the exported dtype; rope and dtype as the installed transformers spells them.

    A hybrid with layers that its source lacks has one of its own. Raises ModelError naming what that cannot say.
    """
    release = transformers_release()
    family = weights_family(config)
    if family.model_type == mcaflow_hybrid.MODEL_TYPE:
        config = mcaflow_hybrid.exported_config(config)
    hf = family.config_to_hf(config if family.hybrid else config.transformer, release)
    spelling, other = ("torch_dtype", "dtype") if release == 4 else ("dtype", "torch_dtype")
    hf.pop(other, None)
    hf.pop("quantization_config", None)  # what was quantized is written as what it stands for
    return {**hf, spelling: dtype}


def transformers_release() -> int:
    """4 or 5; later ones are taken for 5."""
    return min(5, int(importlib.metadata.version("transformers").partition(".")[0]))
