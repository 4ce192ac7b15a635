"""Experts that a source stores as two tensors of a layer, seen as the tensors of each that transformers saves.

    X.experts.gate_up_proj  [E, 2·I, H]      X.experts.0.gate_proj.weight, X.experts.0.up_proj.weight  [I, H] ...
    X.experts.down_proj     [E, H, I]        X.experts.0.down_proj.weight                              [H, I] ...

The publishers' checkpoints of Qwen3.5 have them so, and may have both forms in one; transformers reads either, and
saves the second. Everything above a safetensors file sees tensors of one expert alone, and so an export is written.
Importing this needs no torch.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mca_lib.converter.plan import TensorInfo
from mca_lib.models.registry import FAMILIES

_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_STACK = re.compile(rf"(.+\.experts)\.({'|'.join(_PROJECTIONS)})")


class ExpertPart(NamedTuple):
    """A tensor of one expert, whose elements are consecutive in a stack."""

    name: str
    expert: int
    info: TensorInfo
    start: int
    """Element of the stack at which it begins."""


def stacks_experts(hf: Mapping[str, Any]) -> bool:
    """Whether sources of this config.json may store the experts of a layer as two tensors."""
    family = FAMILIES.get(hf.get("model_type"))
    return family is not None and family.stacked_experts


def expert_parts(name: str, info: TensorInfo) -> Iterator[ExpertPart]:
    """The tensors of each expert that a stack holds, in its order; nothing for another tensor."""
    match = _STACK.fullmatch(name)
    if match is None or len(info.shape) != 3:
        return
    experts, rows, columns = info.shape
    projections = _PROJECTIONS[match[2]]
    shape, start = (rows // len(projections), columns), 0
    for expert in range(experts):
        for projection in projections:
            part = f"{match[1]}.{expert}.{projection}.weight"
            yield ExpertPart(part, expert, TensorInfo(shape, info.dtype), start)
            start += math.prod(shape)


def unstacked(tensors: Mapping[str, TensorInfo], hf: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """The tensors of a directory of this config.json, with those of each expert in the place of stacks."""
    if not stacks_experts(hf):
        return dict(tensors)
    result: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        parts = {part.name: part.info for part in expert_parts(name, info)}
        result |= parts or {name: info}
    return result
