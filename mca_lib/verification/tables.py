"""What a family's tables refuse, and their digest, by which a stale card is known. No torch."""

import inspect
import json
from dataclasses import fields, is_dataclass
from typing import Any

from blake3 import blake3

from mca_lib.models.config_fields import at_default
from mca_lib.models.families.base import Family
from mca_lib.models.families.quantization import WITH_MXFP4
from mca_lib.models.registry import family_of
from mca_lib.models.vision.towers import TOWERS
from mca_lib.verification.layouts import STANDARD
from mca_lib.verification.tiny import tiny_config


def unsupported(model_type: str) -> tuple[str, ...]:
    """The config fields that the family refuses, with the values that it accepts."""
    family, rules = family_of(model_type), []
    for rule in family.neutral:
        accepted = " or ".join(f"`{json.dumps(value)}`" for value in rule.accepted)
        unless = " where it has an effect" if rule.unless else ""
        rules.append(f"`{rule.hf}`{unless}" + (f" other than {accepted}" if accepted else ""))
    window = inspect.getdoc(type(family.window)).splitlines()[0].rstrip(".")
    return (
        f"`architectures` other than `{family.architecture}`",
        *rules,
        *_ropes(family),
        f"sliding windows, unless they are as follows: {window[0].lower()}{window[1:]}",
        *(("videos",) if model_type in TOWERS else ()),
        "`quantization_config` other than FP8 in blocks" + (" or MXFP4" if model_type in WITH_MXFP4 else ""),
    )


def _ropes(family: Family) -> tuple[str, ...]:
    if not family.fixed.get("rotary", True):
        return ()
    if family.sliding_rope_base is not None:
        return (
            "`rope_type` other than `default`, `linear`, `llama3` in layers without a window",
            "`rope_type` other than `default` in layers with one",
        )
    return (f"`rope_type` other than `default`, {', '.join(f'`{kind}`' for kind in family.rope_names.kinds)}",)


def table_digest(model_type: str) -> str:
    """Of the family's tables, its tiny config and the layouts; another one makes the family's card stale."""
    content = [_plain(family_of(model_type)), tiny_config(model_type), STANDARD]
    return blake3(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    """JSON of a table: dataclasses by name and field, functions by their source.

    Without the fields that have their default: a new kind of feature changes no family that lacks it.
    """
    if is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in fields(value) if not at_default(value, f)}
        return [type(value).__name__, {name: _plain(own) for name, own in given.items()}]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if inspect.isfunction(value):
        return inspect.getsource(value).strip()
    return getattr(value, "__qualname__", type(value).__name__)  # a builtin, a class, a sentinel
