"""Canonical JSON, and the key that is made of it.

One value has one text: keys sorted, no white space, ASCII only, integers and floats kept apart (`1` is not `1.0`),
`-0.0` written as `0.0`. A value without such a text is refused with the name of its field, never hashed by its
address or its `repr`: two runs must not get two keys for one recipe, nor one key for two.
"""

import json
import math
from typing import Any

from tasks.errors import CanonicalError

JSON = dict[str, Any] | list[Any] | str | int | float | bool | None

KEY_BYTES = 16


def canonical(value: Any, field: str = "value") -> JSON:
    """A copy of `value` out of plain JSON types (tuples become lists), or CanonicalError that names the field."""
    # Exact types: a str or float subclass (an enum, a numpy scalar) may print differently in the next release.
    kind = type(value)
    if value is None or kind in (str, bool, int):
        return value
    if kind is float:
        if not math.isfinite(value):
            raise CanonicalError(f"{field}: {value} cannot be part of a cache key; use a finite number")
        return value + 0.0
    if kind in (list, tuple):
        return [canonical(item, f"{field}[{i}]") for i, item in enumerate(value)]
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise CanonicalError(f"{field}: the key {key!r} is a {type(key).__name__}; use strings as keys")
        return {key: canonical(value[key], f"{field}.{key}") for key in sorted(value)}
    raise CanonicalError(
        f"{field}: a value of type {kind.__module__}.{kind.__qualname__} has no canonical form; "
        "use a string, a number, a boolean, null, a list or a dict of these"
    )


def canonical_json(value: Any, field: str = "value") -> str:
    """The canonical text of a value."""
    tree = canonical(value, field)
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def blake3_hex(text: str, length: int = 32) -> str:
    """BLAKE3 of an ASCII text, as `2 * length` hex digits."""
    from blake3 import blake3

    return blake3(text.encode("ascii")).hexdigest(length=length)


def stage_key(payload: dict[str, Any]) -> str:
    """Cache key of a stage: 32 hex digits of BLAKE3 over the canonical JSON of its key payload."""
    return blake3_hex(canonical_json(payload, "key"), KEY_BYTES)


def flatten(value: JSON, field: str = "") -> dict[str, JSON]:
    """Leaves by dotted name, `identity.learning_rate`; a list of plain values is one leaf."""
    if isinstance(value, dict) and value:
        children = [(f"{field}.{key}" if field else key, item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        children = [(f"{field}.{i}", item) for i, item in enumerate(value)]
    else:
        return {field: value}
    leaves: dict[str, JSON] = {}
    for name, item in children:
        leaves |= flatten(item, name)
    return leaves
