"""Rotary positions as Hugging Face configs spell them, read and written.

                  base                            scaling
transformers 4    rope_theta                      rope_scaling: {rope_type, factor, ...} or null
transformers 5    rope_parameters: {rope_theta,   rope_type, factor, ...}

The kind is `rope_type`, in old files `type`. Reading takes what transformers takes, and refuses by name two spellings
that differ and what has no counterpart here: a rope that is silently read as the plain one trains and exports a
different model.
"""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from mca_lib.errors import ModelError
from mca_lib.models.config import ROPE_TYPES, Llama3Rope, LongRope, RopeScaling

DEFAULT_BASE = 10000.0
"""transformers' `default_theta` of most families."""

Rope = tuple[float, RopeScaling | None]


@dataclass(frozen=True)
class RopeNames:
    """What a family has of its own in the spelling of a scaling."""

    kinds: dict[str, str] = field(default_factory=lambda: {n: n for n in ROPE_TYPES if n != "longrope"})
    """`rope_type` as it may be spelled → what it is, a key of `ROPE_TYPES`."""
    original_length: int | None = None
    """transformers' `original_max_position_embeddings` of the top level where the config has none; None: there is no
    such field there."""


KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
_KIND = ("rope_type", "type")
_COMMON = {*_KIND, "rope_theta", "partial_rotary_factor"}
_WITHOUT_EFFECT = {"finetuned", "mrope_section", "mrope_interleaved"}
"""A note of YaRN's authors, which no version of transformers reads; and which channels rotate by which coordinate of an
image, which are all the same in text."""


def rope_from_hf(
    hf: dict[str, Any], default_base: float = DEFAULT_BASE, *, partial: bool = False, names: RopeNames = RopeNames()
) -> Rope:
    """(base, scaling) of a Hugging Face config.

    Args:
        partial: some channels of a head may stay as they are; see `partial_rotary`.

    Raises:
        ModelError: naming the field that cannot be carried over.
    """
    given = [where for where in ("rope_scaling", "rope_parameters") if hf.get(where)]
    ropes = {where: _read(hf, where, default_base, partial, names) for where in given}
    if len(ropes) == 2 and ropes["rope_scaling"] != ropes["rope_parameters"]:
        raise ModelError("config.json: rope_parameters and rope_scaling are both given and differ; keep one")
    if ropes:
        return next(iter(ropes.values()))
    base = hf.get("rope_theta")
    return default_base if base is None else float(base), None


def rope_to_hf(
    hf: dict[str, Any],
    rope: Rope,
    major: int | None = None,
    default_base: float = DEFAULT_BASE,
    *,
    partial: bool = False,
    names: RopeNames = RopeNames(),
) -> dict[str, Any]:
    """`hf` with this rope.

    Args:
        major: the release of transformers whose spelling is written, 4 or 5; None keeps the source's own.
    """
    base, scaling = rope
    unchanged = rope_from_hf(hf, default_base, partial=partial, names=names) == rope
    own = 4 if ("rope_theta" in hf or "rope_scaling" in hf) and not hf.get("rope_parameters") else 5
    major = own if major is None else major
    given_keys = [key for key in KEYS if key in hf]
    if unchanged and (not given_keys or (major == own and (own == 4 or given_keys == ["rope_parameters"]))):
        return hf
    source = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    kept = source if unchanged else _spelled(scaling)
    kept = {k: v for k, v in kept.items() if k not in (*_KIND, "rope_theta")}
    kind = next((name for name, cls in ROPE_TYPES.items() if type(scaling) is cls), "default")
    written = source.get("rope_theta", hf.get("rope_theta"))
    base = written if written == base else base  # 10000 stays 10000, not 10000.0
    if major == 4:
        new = {"rope_theta": base, "rope_scaling": {"rope_type": kind, **kept} if scaling is not None else None}
    else:
        new = {"rope_parameters": {"rope_theta": base, "rope_type": kind, **kept}}
    return {key: value for key, value in hf.items() if key not in KEYS} | new


def _read(hf: dict[str, Any], where: str, default_base: float, partial: bool, names: RopeNames) -> Rope:
    given = {key: value for key, value in hf[where].items() if value is not None}
    if nested := [key for key, value in given.items() if isinstance(value, dict)]:
        raise ModelError(f"config.json: {where}.{nested[0]}: ropes that differ between layers are not supported")
    kinds = [given[key] for key in _KIND if key in given]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise ModelError(f"config.json: {where}.rope_type={kinds[0]!r} and {where}.type={kinds[1]!r} differ; keep one")
    kind = kinds[0] if kinds else "default"
    if not partial and given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"config.json: {where}.partial_rotary_factor={given['partial_rotary_factor']} is not supported; "
            "every channel of a head must rotate"
        )
    bases = {given.get("rope_theta"), hf.get("rope_theta")} - {None}
    if len(bases) == 2:
        raise ModelError(f"config.json: {where}.rope_theta and rope_theta are both given and differ; keep one")
    base = float(bases.pop()) if bases else default_base
    if kind == "default":
        _refuse_unknown(given, where, set(), "without a rope_type that uses it")
        return base, None
    if kind not in names.kinds:
        raise ModelError(
            f"config.json: {where}.rope_type={kind!r:.80} is not supported; use default, {', '.join(names.kinds)}"
        )
    cls = ROPE_TYPES[names.kinds[kind]]
    known = {f.name: f for f in fields(cls)}
    _refuse_unknown(given, where, set(known), f"is not a field of rope_type {kind!r}")
    values = {name: given[name] for name in known if name in given}
    if "original_max_position_embeddings" in known:
        _original_length(values, hf, where, kind, names)
    if cls is LongRope and "original_max_position_embeddings" in values and hf.get("max_position_embeddings"):
        values.setdefault("factor", hf["max_position_embeddings"] / values["original_max_position_embeddings"])
    required = [n for n, f in known.items() if f.default is MISSING]
    if missing := [n for n in required if n not in values]:
        raise ModelError(f"config.json: {where}.{missing[0]} is missing; rope_type {kind!r} needs it")
    if cls is Llama3Rope and values["high_freq_factor"] <= values["low_freq_factor"]:
        raise ModelError(f"config.json: {where}.high_freq_factor must be greater than low_freq_factor")
    return base, cls(**values)


def _original_length(values: dict[str, Any], hf: dict[str, Any], where: str, kind: str, names: RopeNames) -> None:
    """transformers reads the length before scaling from the top level too, where some families keep it.

    YaRN without one is scaled from `max_position_embeddings`, by transformers 4 as by 5.
    """
    name = "original_max_position_embeddings"
    outer = hf.get(name, names.original_length)
    if outer is not None and values.get(name, outer) != outer:
        raise ModelError(f"config.json: {where}.{name} and {name} are both given and differ; keep one")
    if outer is None and kind == "yarn":
        outer = hf.get("max_position_embeddings")
    if outer is not None:
        values.setdefault(name, outer)


def _refuse_unknown(given: dict[str, Any], where: str, known: set[str], why: str) -> None:
    if extra := sorted(set(given) - known - _COMMON - _WITHOUT_EFFECT):
        raise ModelError(f"config.json: {where}.{extra[0]} {why}; remove it")


def _spelled(scaling: RopeScaling | None) -> dict[str, Any]:
    """Fields of a scaling, without those at their default."""
    if scaling is None:
        return {}
    values = {f.name: (getattr(scaling, f.name), f.default) for f in fields(scaling)}
    written = {name: value for name, (value, default) in values.items() if value != default}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in written.items()}
