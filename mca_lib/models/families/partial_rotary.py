"""Heads of which only the first channels rotate, as Hugging Face configs spell them: a share of the head.

transformers 5 reads `partial_rotary_factor` from `rope_parameters` or `rope_scaling`, else from the top level;
transformers 4 from the top level alone. The channels are the product with the head size, rounded down.
"""

import math
from collections.abc import Callable
from typing import Any

from mca_lib.errors import ModelError

NAME = "partial_rotary_factor"
_ROPES = ("rope_parameters", "rope_scaling")

HfConfig = dict[str, Any]
Share = float | Callable[[HfConfig], float]
"""A share of a head, or a function of the config that gives it."""


def channels_from_hf(hf: HfConfig, head_size: int, default: Share | None) -> int | None:
    """Channels of a head that rotate, None where all do.

    Args:
        default: transformers' share where the config gives none; None for a family whose heads rotate whole.

    Raises:
        ModelError: two shares differ, or one is not within (0, 1].
    """
    if default is None:
        return None  # another share is refused: by the rule for the field, and where the rope is read
    channels = int(head_size * _share(hf, default))
    if channels < 2:
        raise ModelError(f"config.json: {NAME}={_share(hf, default)}: no channels of a head of {head_size} rotate")
    return None if channels == head_size else channels


def channels_to_hf(
    hf: HfConfig, channels: int | None, head_size: int, default: Share | None, major: int | None = None
) -> HfConfig:
    """`hf` with so many rotating channels, where release 4 or 5 of transformers reads them; None keeps the place."""
    if default is None:
        return hf
    inner = [where for where in _ROPES if NAME in (hf.get(where) or {})]
    said = channels_from_hf(hf, head_size, default) == channels
    if said and not (major == 4 and inner):
        return hf
    share = _share(hf, default) if said else share_of(channels or head_size, head_size)
    without = {where: {k: v for k, v in hf[where].items() if k != NAME} for where in inner}
    if inner and major != 4:
        return {k: v for k, v in hf.items() if k != NAME} | {w: {**hf[w], NAME: share} for w in inner}
    return hf | without | {NAME: share}


def share_of(channels: int, head_size: int) -> float:
    """The share whose product with the head size is `channels` when it is rounded down."""
    share = channels / head_size
    return share if int(head_size * share) == channels else math.nextafter(share, 1.0)


def _share(hf: HfConfig, default: Share) -> float:
    given = {f"{where}.{NAME}": (hf.get(where) or {}).get(NAME) for where in _ROPES} | {NAME: hf.get(NAME)}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return default(hf) if callable(default) else default
    (name, share), *others = given.items()
    if conflict := [n for n, value in others if value != share]:
        raise ModelError(f"config.json: {name} and {conflict[0]} are both given and differ; keep one")
    if not 0 < share <= 1:
        raise ModelError(f"config.json: {name}={share} cannot be used; it must be greater than 0 and at most 1")
    return share
