"""What LLaMA-Factory starts from, and what becomes of its result; rank 0 does it, and no model is held in memory.

<output_dir>/start-*/        the model as a Hugging Face directory, by digest and dtype, sealed
<output_dir>/start-adapter/  the initial adapter, with the values that it has on Megatron-Core
<output_dir>/llama_factory/  where its trainers write; emptied before each attempt
"""

import shutil
from pathlib import Path

import torch

from mca_lib.adapters.peft_files import WEIGHTS_NAME, AdapterFiles, peft_name, write_adapter
from mca_lib.adapters.settings import targets_of
from mca_lib.adapters.targets import linear_layers, modules, target_names
from mca_lib.checkpoint.digest import json_digest
from mca_lib.checkpoint.sealed import find_damage, new_staging, read_record, seal
from mca_lib.checkpoint.side_files import copy_side_files
from mca_lib.converter.export import export_hf
from mca_lib.converter.stream import convert_hf
from mca_lib.errors import ModelError
from mca_lib.models.config import McaModelConfig, is_mca_checkpoint

START, START_ADAPTER, OUTPUT = "start", "start-adapter", "llama_factory"


def hugging_face_directory(source: Path, base: str, output_dir: Path, dtype: str) -> Path:
    """`source`, of the digest `base`, itself where it is one, else what an MCA checkpoint exports to.

    What an earlier attempt has left is taken where it is whole and of the same config.
    """
    if not is_mca_checkpoint(source):
        return source
    directory = output_dir / f"{START}-{base[:16]}-{dtype}"
    made_of = {"config": json_digest(McaModelConfig.from_pretrained(source).meaning())}
    if not made_of.items() <= (read_record(directory) or {}).items() or find_damage(directory):
        staging = new_staging(output_dir)
        export_hf(source, staging, dtype=dtype)
        seal(staging, directory, made_of)
    return directory


def empty(directory: Path) -> None:
    """A new folder in place of what is there."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()


def initial_adapter(lora: AdapterFiles, seed: int, output_dir: Path) -> Path:
    """PEFT's directory of adapters that have learned nothing."""
    from mca_lib.adapters.lora import initial_A

    config = lora.mca_config
    names, r = target_names(config, targets_of(lora.lora_config)), lora.lora_config.r
    tensors: dict[str, torch.Tensor] = {}
    for entry in linear_layers(config):
        for name, (outputs, inputs) in zip(modules(entry), entry.mapping.hf_shapes(config), strict=True):
            if name in names:
                tensors[peft_name(name, "lora_A")] = initial_A(name, r, inputs, seed)
                tensors[peft_name(name, "lora_B")] = torch.zeros(outputs, r)
    directory = output_dir / START_ADAPTER
    write_adapter(lora, tensors, directory)
    return directory


def write_model(trained: Path, start: Path, source: Path, final: Path) -> None:
    """The trained weights as an MCA checkpoint that says of itself what `source` does.

    What the trainers say of tokenizer and config is left aside: they adapt both to each other in memory.
    """
    folder = new_staging(final.parent)
    try:
        for path in trained.glob("*.safetensors*"):
            path.rename(folder / path.name)
        shutil.copyfile(start / "config.json", folder / "config.json")
        copy_side_files(source, folder)
        staging = new_staging(final.parent)
        convert_hf(folder, staging, read_back=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # The dtype that an export gives the weights is that of the model which training started from.
    McaModelConfig.from_pretrained(source).save_pretrained(staging)
    seal(staging, final, {})


def write_trained_adapter(trained: Path, initial: Path, lora: AdapterFiles, final: Path) -> None:
    """The trained adapter, in the files and under the names of one that Megatron-Core trained."""
    from safetensors.torch import load_file

    tensors, expected = load_file(trained / WEIGHTS_NAME), load_file(initial / WEIGHTS_NAME)
    shapes, wanted = ({name: t.shape for name, t in found.items()} for found in (tensors, expected))
    if shapes != wanted:
        name = min(n for n in shapes.keys() ^ wanted.keys() or shapes if shapes.get(n) != wanted.get(n))
        raise ModelError(f"LLaMA-Factory's adapter has {name} {shapes.get(name)}, {wanted.get(name)} is expected")
    staging = new_staging(final.parent)
    write_adapter(lora, {name: tensor.float() for name, tensor in tensors.items()}, staging)
    seal(staging, final, {})
