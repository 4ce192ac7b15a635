"""Ropes that differ between layers with a window and those without, as Hugging Face configs spell them.

                  layers without a window                        layers with it
transformers 4    rope_theta, rope_scaling                       rope_local_base_freq
transformers 5    rope_parameters: {full_attention: {...},       sliding_attention: {...}}

The rope of layers with a window has a base and no scaling.
"""

from typing import Any

from mca_lib.errors import ModelError
from mca_lib.models.families.rope import KEYS, Rope, rope_from_hf, rope_to_hf

HfConfig = dict[str, Any]

_FULL, _SLIDING, _LOCAL = "full_attention", "sliding_attention", "rope_local_base_freq"


def ropes_from_hf(hf: HfConfig, base: float, sliding_base: float) -> tuple[Rope, float]:
    """(rope of layers without a window, base of those with it).

    Args:
        base, sliding_base: transformers' where the config gives none.

    Raises:
        ModelError: naming the field that cannot be carried over.
    """
    return rope_from_hf(_view(hf), base), _sliding(hf, sliding_base)


def ropes_to_hf(
    hf: HfConfig, ropes: tuple[Rope, float], major: int | None, base: float, sliding_base: float
) -> HfConfig:
    """`hf` with these ropes.

    Args:
        major: the release of transformers whose spelling is written, 4 or 5; None keeps the source's own.
    """
    given = [key for key in (*KEYS, _LOCAL) if key in hf]
    own = 4 if given and not hf.get("rope_parameters") else 5
    kept = not given or major is None or (major == own and (own == 4 or given == ["rope_parameters"]))
    if ropes_from_hf(hf, base, sliding_base) == ropes and kept:
        return hf
    (full_base, _), sliding = ropes
    spelled = rope_to_hf(_view(hf), ropes[0], major or own, base)
    rest = {key: value for key, value in spelled.items() if key not in (*KEYS, _LOCAL)}
    if (major or own) == 4:
        theta, scaling = spelled.get("rope_theta", full_base), spelled.get("rope_scaling")
        return rest | {"rope_theta": theta, "rope_scaling": scaling, _LOCAL: sliding}
    full = spelled.get("rope_parameters") or {"rope_theta": full_base, "rope_type": "default"}
    return rest | {"rope_parameters": {_FULL: full, _SLIDING: {"rope_theta": sliding, "rope_type": "default"}}}


def _view(hf: HfConfig) -> HfConfig:
    """The config as it would be with the rope of layers without a window alone."""
    nested = _nested(hf)
    if nested is None:
        return hf
    return {key: value for key, value in hf.items() if key != "rope_parameters"} | (
        {"rope_parameters": nested[_FULL]} if nested.get(_FULL) else {}
    )


def _nested(hf: HfConfig) -> HfConfig | None:
    ropes = hf.get("rope_parameters")
    if not ropes:
        return None
    if unknown := sorted(ropes.keys() - {_FULL, _SLIDING}):
        raise ModelError(
            f"config.json: rope_parameters.{unknown[0]} is not supported for model type {hf.get('model_type')!r}; "
            f"rope_parameters has {_FULL} and {_SLIDING}"
        )
    return ropes


def _sliding(hf: HfConfig, default: float) -> float:
    where = f"rope_parameters.{_SLIDING}"
    given = {k: v for k, v in ((_nested(hf) or {}).get(_SLIDING) or {}).items() if v is not None}
    if given.get("rope_type", "default") != "default":
        raise ModelError(f"config.json: {where}.rope_type={given['rope_type']!r:.80} is not supported; use default")
    if extra := sorted(given.keys() - {"rope_type", "rope_theta"}):
        raise ModelError(f"config.json: {where}.{extra[0]} is not supported; remove it")
    bases = {given.get("rope_theta"), hf.get(_LOCAL)} - {None}
    if len(bases) == 2:
        raise ModelError(f"config.json: {where}.rope_theta and {_LOCAL} are both given and differ; keep one")
    return float(bases.pop()) if bases else default
