"""MCA checkpoint → Hugging Face directory, in one process, one fused tensor in memory at a time."""

import json
from pathlib import Path
from typing import Any

import torch

from mca_lib.checkpoint.side_files import copy_side_files
from mca_lib.checkpoint.verify import WEIGHTS_FOLDER, verify_model
from mca_lib.converter.model_converter import ModelConverter, Progress, no_progress
from mca_lib.converter.plan import FLOAT_DTYPES, entries
from mca_lib.converter.safetensors_writer import ShardedWriter, Slot, parse_size
from mca_lib.errors import CheckpointError, ConfigError
from mca_lib.models.config import CONFIG_NAME, McaModelConfig, is_mca_checkpoint
from mca_lib.models.registry import family_of


def export_hf(
    checkpoint: str | Path,
    output: str | Path,
    *,
    dtype: str = "auto",
    max_shard_size: str = "5GB",
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Write weights, config.json, tokenizer, chat template and generation config; transformers loads the result.

    Args:
        dtype: `auto` gives every tensor the dtype that it had in the source.

    Returns:
        {"parameters", "bytes", "files", "dtype"}

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model than its config says.
    """
    checkpoint, output = Path(checkpoint), Path(output)
    if not is_mca_checkpoint(checkpoint):
        raise CheckpointError(f"{checkpoint}: no {CONFIG_NAME}; give the directory of an MCA checkpoint")
    config = McaModelConfig.from_pretrained(checkpoint)
    reader = verify_model(checkpoint / WEIGHTS_FOLDER, config)
    slots = hf_slots(config, dtype)
    output.mkdir(parents=True, exist_ok=True)
    with ShardedWriter(output, slots, parse_size(max_shard_size)) as writer:
        dtypes = {name: slot.dtype for name, slot in slots.items()}
        for done, (name, tensor) in enumerate(ModelConverter(config).to_hf(reader, dtypes)):
            writer.write(name, tensor)
            progress(done + 1, len(slots))
    files = copy_side_files(checkpoint, output)
    main_dtype = config.source_dtype if dtype == "auto" else dtype
    text = json.dumps(hf_config(config, main_dtype), indent=2, ensure_ascii=False)
    (output / "config.json").write_text(text + "\n", encoding="utf-8")
    return {
        "parameters": writer.total_parameters,
        "bytes": writer.total_bytes,
        "files": sorted([*files, "config.json", *(p.name for p in output.glob("*.safetensors*"))]),
        "dtype": main_dtype,
    }


def hf_slots(config: McaModelConfig, dtype: str) -> dict[str, Slot]:
    """Name → shape and dtype of every tensor of the Hugging Face side, in the order of the weight table."""
    if dtype != "auto" and dtype not in FLOAT_DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not one of auto, {', '.join(FLOAT_DTYPES)}")
    shapes = {n: s for e in entries(config) for n, s in zip(e.hf, e.mapping.hf_shapes(config), strict=True)}
    copies = family_of(config.model_type).copies_of(config)
    shapes |= {name: shapes[copies[name]] for name in config.source_copies}
    exceptions = config.source_dtype_exceptions if dtype == "auto" else {}
    main = config.source_dtype if dtype == "auto" else dtype
    return {name: Slot(shape, getattr(torch, exceptions.get(name, main))) for name, shape in shapes.items()}


def hf_config(config: McaModelConfig, dtype: str) -> dict[str, Any]:
    """The source's config.json with the exported dtype, under the spelling that the source used."""
    hf = family_of(config.model_type).config_to_hf(config)
    spelling = "torch_dtype" if "torch_dtype" in hf and "dtype" not in hf else "dtype"
    return {**hf, spelling: dtype}
