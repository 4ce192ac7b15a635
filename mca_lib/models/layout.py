"""The parallel layout under the recipe's names, and how its sizes must fit the number of ranks. No torch.

    ranks = data × context × pipeline × tensor                    of all weights but the experts'
    ranks = expert data × pipeline × expert × expert tensor       of the experts'

Both hold at once: experts are spread over the ranks of the data, context and tensor dimensions.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from mca_lib.models.hybrid.pattern import PIPE


class ParallelSizes(Protocol):
    """The recipe's `parallel` section, or a `Layout`."""

    tensor: int
    pipeline: int
    virtual_pipeline: int | None
    context: int
    expert: int
    expert_tensor: int | None
    sequence_parallel: bool
    first_stage_layers: int | None
    last_stage_layers: int | None
    pipeline_layout: str | None


ARGUMENTS = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
    "sequence_parallel": "sequence_parallel",
    "first_stage_layers": "num_layers_in_first_pipeline_stage",
    "last_stage_layers": "num_layers_in_last_pipeline_stage",
    "pipeline_layout": "pipeline_model_parallel_layout",
}
"""Field of a layout → Megatron's name, that of the training arguments."""

RECIPE = {name: f"parallel.{name}" for name in ARGUMENTS}
"""Field of a layout → its name in a recipe."""


_NUMBERS = [name for name in ARGUMENTS if name not in ("sequence_parallel", "pipeline_layout")]


@dataclass(frozen=True)
class Layout:
    """Parallel sizes under the recipe's names."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    """Ranks that share each expert; None: as many as share the other weights."""
    sequence_parallel: bool = False
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    """Layers of the first and last pipeline rank; None: an equal share of what is left."""
    pipeline_layout: str | None = None
    """What each stage holds, in Megatron's notation."""

    @classmethod
    def from_args(cls, args: object | None) -> "Layout":
        """From training arguments under Megatron's names; None is one rank.

        A hybrid's pattern with `|` in it is also its pipeline layout.
        """
        if args is None:
            return cls()
        layout = cls(**{name: getattr(args, argument) for name, argument in ARGUMENTS.items()})
        pattern = None if getattr(args, "use_legacy_model", False) else getattr(args, "hybrid_layer_pattern", None)
        if pattern and PIPE in pattern and layout.pipeline_layout is None:
            return replace(layout, pipeline_layout=pattern)
        return layout


def renamed(message: str, names: Mapping[str, str]) -> str:
    """A message that names fields as a recipe does, with other names: `parallel.tensor=3` → `--tensor=3`.

    A flag has no value, and what is to be set is written as an option takes it: `--last-stage-layers 4`.
    """
    message = re.sub(r"parallel\.sequence_parallel: true", "parallel.sequence_parallel", message)
    message = re.sub(r"\b(set|write) (parallel\.\w+): ", r"\1 \2 ", message)
    return re.sub(r"\bparallel\.(\w+)", lambda match: names.get(match[1], match[0]), message)


def virtual_stages(layout: ParallelSizes) -> int | None:
    """Model chunks per pipeline rank, None for one."""
    return layout.virtual_pipeline if (layout.virtual_pipeline or 1) > 1 else None


def expert_tensor_size(layout: ParallelSizes) -> int:
    """Ranks that share each expert."""
    return layout.expert_tensor or layout.tensor


def model_ranks(layout: ParallelSizes) -> int:
    """Ranks that hold one replica of the model; expert parallelism lives inside the data parallel dimension."""
    return layout.tensor * layout.pipeline * layout.context


def size_problems(layout: ParallelSizes, names: Mapping[str, str] = RECIPE) -> Iterator[str]:
    """Sizes that are none or contradict each other, whatever the model is, as `field: reason`.

    `names` are the fields as the user knows them: `RECIPE` or `ARGUMENTS`.
    """
    yield from too_small(layout, names)
    if virtual_stages(layout) and layout.pipeline == 1:
        yield f"{names['virtual_pipeline']}: {layout.virtual_pipeline} needs {names['pipeline']} of at least 2"
    if layout.sequence_parallel and layout.tensor == 1:
        yield f"{names['sequence_parallel']}: true needs {names['tensor']} of at least 2"


def too_small(layout: ParallelSizes, names: Mapping[str, str] = RECIPE) -> Iterator[str]:
    """Sizes of less than 1, as `field: reason`."""
    for name in _NUMBERS:
        size = getattr(layout, name)
        if size is not None and size < 1:
            yield f"{names[name]}: {size} is too small; it must be at least 1"


def rank_problems(layout: ParallelSizes, ranks: int, names: Mapping[str, str] = RECIPE) -> Iterator[str]:
    """Why so many ranks cannot be laid out so; expects sizes without `size_problems`."""
    groups = (
        {"tensor": layout.tensor, "pipeline": layout.pipeline, "context": layout.context},
        {"expert_tensor": expert_tensor_size(layout), "expert": layout.expert, "pipeline": layout.pipeline},
    )
    for group in groups:
        product = math.prod(group.values())
        if ranks % product:
            sizes = " × ".join(f"{names[name]}={size}" for name, size in group.items())
            yield f"{ranks} ranks cannot be split into {sizes} = {product}; use a multiple of {product}"
