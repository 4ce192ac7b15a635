"""Rotary positions as Hugging Face configs spell them.

transformers 4 keeps `rope_theta` and `rope_scaling` at the top, transformers 5 puts both into `rope_parameters`. The
kind is `rope_type`, in old files `type`. What has no counterpart here is refused by name: a rope that is silently
read as the plain one trains and exports a different model.
"""

from typing import Any

from mca_lib.errors import ModelError
from mca_lib.models.config import Llama3Rope

DEFAULT_BASE = 10000.0
"""transformers' `default_theta` for the families here."""

_PLAIN = {"default", None}
_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_KNOWN = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def rope_from_hf(hf: dict[str, Any]) -> tuple[float, Llama3Rope | None]:
    """(base, scaling) of a Hugging Face config. Raises ModelError naming the field that cannot be carried over."""
    if hf.get("rope_parameters") and hf.get("rope_scaling") and hf["rope_parameters"] != hf["rope_scaling"]:
        raise ModelError("config.json: rope_parameters and rope_scaling are both given and differ; keep one")
    where = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    given = hf.get(where) or {}
    if not isinstance(given, dict):
        raise ModelError(f"config.json: {where} must be an object, found {given!r}")
    base = given.get("rope_theta", hf.get("rope_theta"))
    base = DEFAULT_BASE if base is None else float(base)
    kind = given.get("rope_type", given.get("type"))
    if given.get("partial_rotary_factor") not in (None, 1.0):
        raise ModelError(
            f"config.json: {where}.partial_rotary_factor={given['partial_rotary_factor']} is not supported; "
            "every channel of a head must rotate"
        )
    if kind in _PLAIN:
        if extra := sorted(k for k, v in given.items() if k not in _KNOWN and v is not None):
            raise ModelError(f"config.json: {where}.{extra[0]} without a rope_type that uses it; remove it")
        return base, None
    if kind != "llama3":
        raise ModelError(f"config.json: {where}.rope_type={kind!r} is not supported; only 'default' and 'llama3' are")
    if missing := [n for n in _LLAMA3_FIELDS if given.get(n) is None]:
        raise ModelError(f"config.json: {where}.{missing[0]} is missing; rope_type 'llama3' needs it")
    return base, Llama3Rope(**{n: given[n] for n in _LLAMA3_FIELDS})
