"""The parts of a config from the objects of `mca_config.json`. No torch."""

from typing import Any

from mca_lib.errors import ConfigError
from mca_lib.models.config_fields import from_json
from mca_lib.models.config_parts import (
    ROPE_TYPES,
    Experts,
    GatedDeltaNet,
    HybridLayers,
    LatentAttention,
    Mamba2,
    RopeScaling,
)
from mca_lib.models.vision.part import Vision

_PARTS = {
    "latent_attention": LatentAttention,
    "gated_delta_net": GatedDeltaNet,
    "moe": Experts,
    "hybrid": HybridLayers,
    "vision": Vision,
}


def parts_from_json(values: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of `McaModelConfig` that are dataclasses. Raises ConfigError naming the key that cannot be used."""
    parts: dict[str, Any] = {}
    for name, part in _PARTS.items():
        given = values.get(name)
        if name == "hybrid" and isinstance(given, dict) and given.get("mamba") is not None:
            given = given | {"mamba": from_json(Mamba2, given["mamba"], f"{where}: hybrid: mamba")}
        if given is not None:
            parts[name] = from_json(part, given, f"{where}: {name}")
    if values.get("rope_scaling") is not None:
        parts["rope_scaling"] = _rope(values["rope_scaling"], f"{where}: rope_scaling")
    return parts


def _rope(values: Any, where: str) -> RopeScaling:
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be an object, found {values!r:.80}")
    values = dict(values)
    kind = values.pop("rope_type", None)
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise ConfigError(f"{where}: rope_type {kind!r:.80} is not one of {', '.join(ROPE_TYPES)}")
    return from_json(ROPE_TYPES[kind], values, where)
