"""Body of ``mcaflow inspect``: what a model is, and what training it takes of each rank's memory. Allocates nothing."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from rich.console import Console
from rich.table import Table

from flows.console import WIDE, make_console
from mca_lib.converter.headers import check_weights, weight_files
from mca_lib.errors import ConfigError, ModelError
from mca_lib.models import size
from mca_lib.models.config import McaModelConfig, is_mca_checkpoint, read_json
from mca_lib.models.layout import ARGUMENTS, Layout, model_ranks, rank_problems, renamed, size_problems
from mca_lib.models.layout_rules import check_training_layout
from mca_lib.models.memory import StageMemory, Training, stage_memory
from mca_lib.models.registry import config_from_hf
from mca_lib.verification.layouts import layout_name, ranks_of

_SHOWN = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "max_position_embeddings",
    "rotary_base",
    "rope_scaling",
    "sliding_window",
    "latent_attention",
    "moe",
    "mtp_num_layers",
    "tie_word_embeddings",
)
_OPTIONS = {name: "--" + name.replace("_", "-") for name in ARGUMENTS}
"""Field of a layout → the command's option."""
_BYTES = ("weights", "gradients", "optimizer", "activations", "total")


@dataclass(frozen=True)
class Inspection:
    """What is known without allocating anything."""

    config: McaModelConfig
    weights: str
    """What is known of the weights' files."""
    layout: Layout
    ranks: int
    training: Training
    refused: str | None
    """Why the model cannot be trained at this layout."""
    stages: tuple[StageMemory, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; bytes and elements."""
        config = self.config.to_dict()
        return {
            "model_type": self.config.model_type,
            "config": {name: config[name] for name in _SHOWN},
            "parameters": {**size.parts(self.config), "total": size.total(self.config)},
            "active_parameters": size.active(self.config),
            "weights": self.weights,
            "layout": {"name": layout_name(self.layout), **asdict(self.layout)},
            "ranks": self.ranks,
            "training": asdict(self.training),
            "refused": self.refused,
            "stages": [{**asdict(stage), "total": stage.total} for stage in self.stages],
        }


def inspect_model(
    model: Path, layout: Layout, training: dict[str, Any], *, ranks: int | None, data: int | None, as_json: bool
) -> None:
    """``mcaflow inspect``; exit code 2 when the model cannot be trained at the layout, which JSON says as well."""
    found = inspection(model, layout, _training(training), ranks, data)
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
        if found.refused:
            sys.exit(2)
    elif found.refused:
        raise ConfigError(found.refused)
    else:
        _print(found, make_console())


def inspection(
    model: Path, layout: Layout, training: Training, ranks: int | None = None, data: int | None = None
) -> Inspection:
    """Raises ModelError for a model that cannot be converted, ConfigError for sizes that contradict each other."""
    config, weights = _read(model)
    for problem in size_problems(layout, _OPTIONS):
        raise ConfigError(problem)
    if ranks is not None and data is not None:
        raise ConfigError("--ranks and --data are both given; one follows from the other")
    ranks = ranks or (data * model_ranks(layout) if data else ranks_of(layout))
    refused = next(rank_problems(layout, ranks, _OPTIONS), None)
    stages: tuple[StageMemory, ...] = ()
    try:
        check_training_layout(config, layout)
        if refused is None:
            stages = stage_memory(config, layout, training, ranks)
    except ConfigError as error:
        refused = renamed(str(error), _OPTIONS)
    return Inspection(config, weights, layout, ranks, training, refused, stages)


def _read(model: Path) -> tuple[McaModelConfig, str]:
    if model.is_file():
        return config_from_hf(read_json(model, ModelError)), "not looked at"
    if not model.is_dir():
        raise ModelError(f"{model}: no such file or directory")
    config = McaModelConfig.from_pretrained(model)
    if is_mca_checkpoint(model):
        return config, "an MCA checkpoint"
    try:
        files = weight_files(model)
    except ModelError as error:
        return config, f"cannot be used: {error}" if any(model.glob("*.safetensors*")) else "none here"
    stored = check_weights(config, model)
    without = (
        ""
        if stored.mtp_num_layers == config.mtp_num_layers
        else (f", without the {config.mtp_num_layers} multi-token prediction layers that config.json counts")
    )
    return stored, f"{len(files)} file{'s' * (len(files) > 1)}, complete by the headers{without}"


def _training(values: dict[str, Any]) -> Training:
    for name, hint in get_type_hints(Training).items():
        if (allowed := get_args(hint)) and values[name] not in allowed:
            raise ConfigError(f"--{name} {values[name]}: must be one of {', '.join(allowed)}")
    for name in ("sequence_length", "micro_batch_size"):
        if values[name] < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {values[name]}: must be at least 1")
    return Training(**values)


def _short(value: Any) -> str:
    """A part of the config as text: what is unset is left out, and of consecutive layers the ends are named."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {_short(v)}" for k, v in value.items() if v is not None and v is not False)
    if isinstance(value, list) and value == list(range(value[0], value[-1] + 1)):
        return f"{value[0]} to {value[-1]}"
    return str(value)


def _print(found: Inspection, console: Console) -> None:
    facts = Table(box=None, pad_edge=False, show_header=False)
    for heading in ("field", "value"):
        facts.add_column(heading, overflow="fold")
    facts.add_row("model type", found.config.model_type)
    config = found.config.to_dict()
    for name in _SHOWN:
        if config[name] not in (None, 0, False):
            facts.add_row(name, _short(config[name]))
    if found.config.moe is not None:
        facts.add_row("balancing", "off in training: neither aux_loss_coeff nor updates of expert biases are used")
    facts.add_row("weights", found.weights)
    console.print(facts, highlight=False)
    wide = Console(width=WIDE)
    console.print()
    parts = Table("part", "parameters", box=None, pad_edge=False)
    parts.columns[1].justify = "right"
    for name, count in size.parts(found.config).items():
        if count:
            parts.add_row(name, f"{count:,}")
    parts.add_row("total", f"{size.total(found.config):,}")
    if size.active(found.config) != size.total(found.config):
        parts.add_row("active per token", f"{size.active(found.config):,}")
    wide.print(parts)
    console.print()
    training = found.training
    optimizer = "distributed optimizer" if training.distributed_optimizer else "optimizer on every replica"
    console.print(
        f"{layout_name(found.layout)} on {found.ranks} rank{'s' * (found.ranks > 1)}, {training.precision}, "
        f"{optimizer}, {training.micro_batch_size} x {training.sequence_length} tokens, "
        f"recompute {training.recompute}",
        highlight=False,
    )
    memory = Table("stage", "layers", "parameters", *_BYTES, box=None, pad_edge=False)
    for column in memory.columns:
        column.justify = "right"
    for stage in found.stages:
        sizes = [f"{getattr(stage, name) / 2**30:.2f}" for name in _BYTES]
        memory.add_row(str(stage.stage), str(stage.layers), f"{stage.parameters:,}", *sizes)
    wide.print(memory)
    console.print(
        "GiB per rank. Activations are an estimate (what the backward pass keeps, after Korthikanti et al. 2022, "
        "arXiv 2205.05198); what the framework and communication need comes on top, and while a checkpoint is gathered "
        f"{max(stage.saving for stage in found.stages) / 2**30:.2f} GiB of main memory per rank.",
        style="dim",
        highlight=False,
    )
