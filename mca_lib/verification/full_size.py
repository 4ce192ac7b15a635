"""Models of full size, as figures: the plan of their conversion and their memory, without a weight.

    python -m mca_lib.verification.full_size [NAME ...] [--against-transformers]

The configs are public hyper-parameters. With `--against-transformers` the plan is held against the names and shapes of
transformers' own model, built on the meta device; without it, against those that the family's table gives.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from mca_lib.converter.plan import Plan, TensorInfo, entries, make_plan
from mca_lib.models import size
from mca_lib.models.config import McaModelConfig
from mca_lib.models.layout import Layout
from mca_lib.models.layout_rules import check_training_layout
from mca_lib.models.memory import StageMemory, Training, stage_memory
from mca_lib.models.registry import config_from_hf
from mca_lib.verification.full_size_configs import CONFIGS, LAYOUTS
from mca_lib.verification.layouts import layout_name


@dataclass(frozen=True)
class FullSize:
    """One row of the table."""

    name: str
    config: McaModelConfig
    plan: Plan
    seconds: float
    """What the plan took."""
    ranks: int
    layout: Layout
    training: Training
    stages: tuple[StageMemory, ...]


def full_size(name: str, *, against_transformers: bool = False, num_layers: int | None = None) -> FullSize:
    """Plan and memory of one model.

    Args:
        num_layers: so many layers of it, for a quicker look; the memory is that of the whole model.

    Raises:
        ModelError: the plan is not complete.
        ConfigError: the layout does not fit.
    """
    config = config_from_hf(CONFIGS[name])
    hf = _with_layers(CONFIGS[name], num_layers) if num_layers else CONFIGS[name]
    source = transformers_tensors(hf) if against_transformers else table_tensors(config_from_hf(hf))
    begin = time.perf_counter()
    plan = make_plan(config_from_hf(hf), source)
    seconds = time.perf_counter() - begin
    ranks, layout, training = LAYOUTS[name]
    check_training_layout(config, layout)
    stages = stage_memory(config, layout, training, ranks)
    return FullSize(name, config, plan, seconds, ranks, layout, training, stages)


def _with_layers(hf: dict[str, Any], count: int) -> dict[str, Any]:
    if "text_config" in hf:
        return hf | {"text_config": _with_layers(hf["text_config"], count)}
    return hf | {"num_hidden_layers": count}


def table_tensors(config: McaModelConfig) -> dict[str, TensorInfo]:
    """What a bf16 checkpoint of this config holds, by the family's table."""
    return {
        name: TensorInfo(shape, "bfloat16")
        for entry in entries(config)
        for name, shape in zip(entry.hf, entry.mapping.hf_shapes(config), strict=True)
    }


def transformers_tensors(hf: dict[str, Any]) -> dict[str, TensorInfo]:
    """What transformers would save for this config, from its model on the meta device.

    transformers does not build multi-token prediction layers; theirs come from the table.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.core_model_loading import revert_weight_conversion

    values = deepcopy(hf)  # transformers writes into the rope
    with torch.device("meta"):
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        auto = AutoModelForImageTextToText if "vision_config" in hf else AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.bfloat16)
    state = revert_weight_conversion(model, model.state_dict())
    found = {name: TensorInfo(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in state.items()}
    extra = (f"model.layers.{config_from_hf(hf).num_layers}.", "mtp.")
    return found | {n: info for n, info in table_tensors(config_from_hf(hf)).items() if n.startswith(extra)}


_COLUMNS = ("weights", "gradients", "optimizer", "activations", "total")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m mca_lib.verification.full_size", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CONFIGS))
    parser.add_argument("--against-transformers", action="store_true")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.names if name not in CONFIGS]:
        parser.error(f"{unknown[0]}: none of {', '.join(CONFIGS)}")
    for name in arguments.names or CONFIGS:
        row = full_size(name, against_transformers=arguments.against_transformers)
        tensors = sum(len(e.hf) for e in row.plan.entries)
        print(
            f"{name}: {size.total(row.config):,} parameters, {size.active(row.config):,} active per token; "
            f"plan of {tensors:,} tensors complete in {row.seconds:.2f} s; {row.ranks} ranks, "
            f"{layout_name(row.layout)}, sequences of {row.training.sequence_length}, "
            f"recomputation {row.training.recompute}"
        )
        print("".join(f"{title:>13}" for title in ("stage", "layers", *_COLUMNS)) + "   GiB per rank")
        for stage in row.stages:
            gib = [f"{getattr(stage, column) / 2**30:.1f}" for column in _COLUMNS]
            print("".join(f"{value:>13}" for value in (stage.stage, stage.layers, *gib)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
