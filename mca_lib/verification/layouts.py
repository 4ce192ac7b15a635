"""The parallel layouts that a verification tries, by name. No torch.

A name says its sizes: `TP2×EP2` is two ranks per weight matrix and two groups of experts. `PP2×FIRST1` is an uneven
pipeline: its first stage has 1 layer (`LAST` is the last one). `one rank` is none of them.
"""

import math
import re
from dataclasses import replace

from mca_lib.errors import ConfigError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.layout import Layout, expert_tensor_size, model_ranks, renamed, size_problems
from mca_lib.models.layout_rules import check_config_layout

ONE_RANK = "one rank"
STANDARD = (
    ONE_RANK,
    *("TP2", "TP2×SP", "PP2", "PP2×FIRST1", "PP2×VPP2", "CP2"),
    *("EP2", "TP2×EP2", "TP2×ETP1", "PP2×EP2"),
)
"""Every card has these, measured or with the reason why the model cannot have it."""

_SIZES = {
    "TP": "tensor",
    "PP": "pipeline",
    "VPP": "virtual_pipeline",
    "CP": "context",
    "EP": "expert",
    "ETP": "expert_tensor",
    "FIRST": "first_stage_layers",
    "LAST": "last_stage_layers",
}
_NAMES = {field: short for short, field in _SIZES.items()} | {
    "sequence_parallel": "SP",
    "pipeline_layout": "a custom pipeline layout",
}
_STAND_INS = (3, 5, 7)
"""Sizes that take the place of 2 where 2 does not divide the model."""


def parse_layout(name: str) -> Layout:
    """`TP2×EP2`, also written `TP2xEP2`; `SP` is sequence parallelism. Raises ConfigError."""
    if name.strip().lower() in (ONE_RANK, "1", "one"):
        return Layout()
    values: dict[str, int | bool] = {}
    for part in re.split(r"[×x*]", name.strip()):
        match = re.fullmatch(rf"({'|'.join(_SIZES)})([1-9]\d*)", part.strip().upper())
        if part.strip().upper() == "SP":
            values["sequence_parallel"] = True
        elif match:
            values[_SIZES[match[1]]] = int(match[2])
        else:
            raise ConfigError(f"layout {name!r}: {part!r} is none of {', '.join(_SIZES)} with a size, or SP")
    layout = Layout(**values)
    for problem in size_problems(layout, _NAMES):
        raise ConfigError(f"layout {name!r}: {problem}")
    return layout


def layout_name(layout: Layout) -> str:
    """Inverse of `parse_layout`."""
    parts = []
    for short, field in _SIZES.items():
        value = getattr(layout, field)
        if value is not None and (value > 1 or field in ("expert_tensor", "first_stage_layers", "last_stage_layers")):
            parts.append(f"{short}{value}")
    return "×".join([*parts, *(["SP"] if layout.sequence_parallel else [])]) or ONE_RANK


def ranks_of(layout: Layout) -> int:
    """The fewest ranks that the layout needs; experts and other weights are spread over the same ranks."""
    return math.lcm(model_ranks(layout), expert_tensor_size(layout) * layout.expert * layout.pipeline)


def refusal(config: McaModelConfig, layout: Layout) -> str | None:
    """Why the model cannot have this layout; None when it can."""
    try:
        check_config_layout(config, layout)
    except ConfigError as error:
        return renamed(str(error), _NAMES)
    return None


def stand_in(config: McaModelConfig, layout: Layout) -> Layout | None:
    """A layout of the same kind with other sizes, for one that the model refuses; None when there is none."""
    for size in _STAND_INS:
        for field in ("virtual_pipeline", "tensor", "pipeline"):
            if getattr(layout, field) == 2:
                other = replace(layout, **{field: size})
                if refusal(config, other) is None:
                    return other
    return None
