"""A dataclass from JSON: every key known, none missing, every value of the kind that its annotation says. No torch."""

import difflib
import math
from dataclasses import MISSING, Field, fields
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mca_lib.errors import ConfigError

_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    NoneType: "null",
}


def from_json(cls: type, values: Any, where: str) -> Any:
    """An instance of `cls`, its parts that are dataclasses being instances already.

    Raises ConfigError naming the key that is unknown, with the nearest known one, or missing, or of another kind.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be an object, found {values!r:.80}")
    known = {f.name: f for f in fields(cls)}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}{hint}")
    required = [n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    if missing := [n for n in required if n not in values]:
        raise ConfigError(f"{where}: missing key {', '.join(missing)}")
    hints = get_type_hints(cls)
    for key, value in values.items():
        if not _fits(value, hints[key]):
            shown = "null" if value is None else repr(value)
            raise ConfigError(f"{where}: {key}={shown:.80} cannot be used; it must be {_words(hints[key])}")
    return cls(**values)


def _fits(value: Any, hint: Any) -> bool:
    """Is a value of JSON what this annotation says? A list stands for a tuple."""
    kind, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if kind is UnionType:
        return any(_fits(value, option) for option in inner)
    if kind is Literal:
        return isinstance(value, str) and value in inner
    if kind is tuple:
        return isinstance(value, list | tuple) and all(_fits(item, inner[0]) for item in value)
    if kind is dict:
        return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint


def _words(hint: Any) -> str:
    kind, inner = get_origin(hint), get_args(hint)
    if kind is UnionType:
        return " or ".join(_words(option) for option in inner)
    if kind is Literal:
        return "one of " + ", ".join(inner)
    if kind is tuple:
        return f"a list, each {_words(inner[0])}"
    if kind is dict:
        return "an object" if inner[1] is Any else f"an object, each value {_words(inner[1])}"
    return _WORDS.get(hint, "an object")


def at_default(value: Any, f: Field) -> bool:
    """Whether a field of a dataclass has its default; one without a default never has."""
    return getattr(value, f.name) == (f.default if f.default_factory is MISSING else f.default_factory())
