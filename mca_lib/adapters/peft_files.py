"""A PEFT adapter directory: written from ranks, read and merged without any.

    adapter_config.json          PEFT's LoraConfig
    adapter_model.safetensors    fp32, Hugging Face names
    mca_adapter.json             {"base": digest of the weights that it was trained on}, where the writer knows it

Bytes depend on the adapter alone, not on the layout that trained it: the matrices are cut and put together, never
added. Merging is W + scaling · B·A in fp32, cast once, tensor by tensor on whole matrices.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mca_lib.adapters.settings import scaling, targets_of
from mca_lib.adapters.targets import WEIGHT, expert_entries, linear_layers, modules, target_names
from mca_lib.checkpoint.reader import CheckpointReader
from mca_lib.checkpoint.sealed import naming
from mca_lib.converter.mappings import Row
from mca_lib.converter.plan import entries
from mca_lib.errors import CheckpointError
from mca_lib.models.config import McaModelConfig, read_json
from mca_lib.models.families.base import respelled

if TYPE_CHECKING:
    from peft import LoraConfig

    from mca_lib.models.model_factory import VirtualModels

CONFIG_NAME, WEIGHTS_NAME, BASE_NAME = "adapter_config.json", "adapter_model.safetensors", "mca_adapter.json"
PREFIX = "base_model.model."
"""What PEFT puts before the name of a module."""


@dataclass(frozen=True)
class AdapterFiles:
    """What an adapter's files say beside its tensors."""

    mca_config: McaModelConfig
    lora_config: "LoraConfig"
    base_digest: str | None
    """Of the weights that it is for, where it is known."""


def peft_name(module: str, matrix: str) -> str:
    """Name in a PEFT file of `lora_A` or `lora_B` of a Hugging Face module."""
    return f"{PREFIX}{module}.{matrix}.weight"


def is_adapter(directory: str | Path) -> bool:
    """Is this a PEFT adapter directory?"""
    return Path(directory, CONFIG_NAME).is_file()


def save_adapter(models: "VirtualModels", directory: Path) -> None:
    """Write the adapters of all ranks; collective. The directory may exist.

    They go through a torch_dist checkpoint beside it, which puts the shares of all ranks together.
    """
    from megatron.core import dist_checkpointing

    from mca_lib.checkpoint.collective import from_rank_0, new_passage
    from mca_lib.checkpoint.model import translated_failures

    def write() -> None:
        reader = CheckpointReader(passage)
        about = AdapterFiles(models.mca_config, models.lora_config, models.base_digest)
        write_adapter(about, {tensor.name: reader.read(tensor.name) for tensor in reader}, directory)

    passage = Path(from_rank_0(lambda: new_passage(directory)))
    try:
        state = {str(i): model.adapters.sharded_state_dict() for i, model in enumerate(models)}
        with translated_failures(passage, "written"):
            dist_checkpointing.save(state, str(passage))
        from_rank_0(write)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(passage, ignore_errors=True)


def write_adapter(about: AdapterFiles, tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write the files, the configuration last: a directory without it is no adapter."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    with naming(directory / WEIGHTS_NAME):
        save_file({name: tensors[name] for name in sorted(tensors)}, directory / WEIGHTS_NAME, {"format": "pt"})
    if about.base_digest is not None:
        (directory / BASE_NAME).write_text(json.dumps({"base": about.base_digest}) + "\n", encoding="utf-8")
    text = json.dumps(peft_config(about.mca_config, about.lora_config), indent=2, sort_keys=True)
    (directory / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")


def copy_adapter(source: Path, target: Path) -> list[str]:
    """Copy PEFT's two files, unchanged, into a folder that may exist; returns their names."""
    target.mkdir(parents=True, exist_ok=True)
    for name in (WEIGHTS_NAME, CONFIG_NAME):
        shutil.copyfile(source / name, target / name)
    return [WEIGHTS_NAME, CONFIG_NAME]


def peft_config(config: McaModelConfig, lora: Any) -> dict[str, Any]:
    """The content of adapter_config.json: PEFT's own, with targets that it finds in transformers' model.

    transformers 5 holds the experts of a layer as two tensors, which PEFT (0.21) adapts as `target_parameters`: gate
    and up as one of twice the rank. In a model with such experts PEFT takes every target that ends in `gate_proj`,
    `up_proj` or `down_proj` for theirs, so those of dense layers and shared experts are named as parameters too.
    PEFT has no dropout on parameters; dropout matters in training alone, and is left out there.
    """
    names = target_names(config, targets_of(lora))
    values = {**lora.to_dict(), "inference_mode": True, "target_modules": _ends(config, names)}
    if config.moe is not None:
        values |= _with_experts(config, names, lora)
    return json.loads(json.dumps(values, default=sorted))


def _with_experts(config: McaModelConfig, names: frozenset[str], lora: Any) -> dict[str, Any]:
    experts = expert_entries(config)
    parameters = set()
    for entry in experts:
        if modules(entry)[0] in names:
            parameters.add("experts.down_proj" if isinstance(entry.mapping, Row) else "experts.gate_up_proj")
    own = {name for entry in experts for name in modules(entry)}
    mlps = {name for name in names - own if ".mlp." in name}
    parameters |= {end + WEIGHT for end in _ends(config, mlps)}
    if not parameters:
        return {}
    values = {
        "target_modules": _ends(config, names - own - mlps),
        "target_parameters": sorted(parameters),
        "lora_dropout": 0.0,
    }
    if "experts.gate_up_proj" in parameters:
        # Twice the rank, the same factor: alpha / r, or alpha / √r.
        alpha = lora.lora_alpha * (2**0.5 if lora.use_rslora else 2)
        fused = r".*\.gate_up_proj"
        values |= {"rank_pattern": {fused: 2 * lora.r}, "alpha_pattern": {fused: alpha}}
    return values


def _ends(config: McaModelConfig, names: set[str] | frozenset[str]) -> list[str]:
    """The shortest ends of names that stand for these modules and no others; a full name where there is no such end."""
    table = linear_layers(config) if config.vision is None else entries(replace(config, source_prefixes={}))
    others = {name for entry in table for name in modules(entry)} - names
    ends = set()
    for name in names:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            end = ".".join(parts[-count:])
            if not any(other == end or other.endswith(f".{end}") for other in others):
                ends.add(end)
                break
    return sorted(ends)


class Adapter:
    """An adapter directory, to be merged into the weights of its base.

    Args:
        base: digest of the weights that it is to be merged into, to be compared with that of its training.

    Raises:
        CheckpointError: it is incomplete, of another model, or of another base.
    """

    def __init__(self, directory: str | Path, config: McaModelConfig, base: str | None = None) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        self.directory = Path(directory)
        self._prefixes = config.source_prefixes
        settings = read_json(self.directory / CONFIG_NAME, CheckpointError)
        self.scaling = scaling(settings["r"], settings["lora_alpha"], settings["use_rslora"])
        try:
            self.tensors = load_file(self.directory / WEIGHTS_NAME)
        except (OSError, SafetensorError) as e:
            raise CheckpointError(f"{self.directory / WEIGHTS_NAME}: cannot be read: {e}") from e
        self._check_base(base)
        self._check_names(config, settings["r"])

    @property
    def weights(self) -> set[str]:
        """Hugging Face names of the weights that have an adapter."""
        return set(self._modules)

    @cached_property
    def _modules(self) -> dict[str, str]:
        """Name of a weight, as the source spells it → its module."""
        ends = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in self.tensors}
        return {respelled(end + WEIGHT, self._prefixes): end for end in ends}

    def merged(self, name: str, weight_OI: torch.Tensor) -> torch.Tensor:
        """One of `weights`, fp32, with its adapter."""
        A_RI, B_OR = (self.tensors[peft_name(self._modules[name], matrix)] for matrix in ("lora_A", "lora_B"))
        return weight_OI.float() + (B_OR.float() @ A_RI.float()) * self.scaling

    def _check_base(self, base: str | None) -> None:
        path = self.directory / BASE_NAME
        trained_on = read_json(path, CheckpointError)["base"] if path.is_file() else None
        if None not in (base, trained_on) and base != trained_on:
            raise CheckpointError(
                f"{self.directory}: the adapter was trained on a model with the digest {trained_on[:16]}, this one has "
                f"{base[:16]}: use the model that it was trained on"
            )

    def _check_names(self, config: McaModelConfig, r: int) -> None:
        shapes = {}
        for entry in linear_layers(config):
            for module, (outputs, inputs) in zip(modules(entry), entry.mapping.hf_shapes(config), strict=True):
                shapes |= {peft_name(module, "lora_A"): (r, inputs), peft_name(module, "lora_B"): (outputs, r)}
        for name, tensor in self.tensors.items():
            if shapes.get(name) != tuple(tensor.shape):
                expected = f"{list(shapes[name])} is expected" if name in shapes else "the model has no such module"
                raise CheckpointError(f"{self.directory}: {name} {list(tensor.shape)}: {expected}")
            if not tensor.isfinite().all():
                raise CheckpointError(f"{self.directory}: {name} holds NaN or an infinite value")
            pair = name.replace("lora_A", "lora_B") if "lora_A" in name else name.replace("lora_B", "lora_A")
            if pair not in self.tensors:
                raise CheckpointError(f"{self.directory}: {pair} is missing")
