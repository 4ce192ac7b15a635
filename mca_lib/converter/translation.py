"""A transformer's Hugging Face weights as a hybrid's: its own layers by the weight table, fresh ones by a seed.

source tensor ──(family's table, layers renumbered)──> attention, MLP, embeddings, norms
seed ──(models.hybrid.fresh)──────────────────────────> Mamba-2 layers
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from mca_lib.converter.plan import Entry, Plan, entries
from mca_lib.models.config import HybridLayers, McaModelConfig
from mca_lib.models.hybrid.fresh import KEPT_IN_FP32, FreshMode, fresh_dtype, fresh_tensor
from mca_lib.models.registry import weights_family


@dataclass(frozen=True)
class Translation:
    """What makes a hybrid of a transformer."""

    layers: HybridLayers
    fresh_layers: FreshMode = "random"
    seed: int = 0
    field: str = "hybrid_layer_pattern"
    """The user's name of the pattern, for errors."""

    def config(self, transformer: McaModelConfig) -> McaModelConfig:
        """The hybrid. Raises ConfigError, naming the pattern's field, where the transformer cannot become it."""
        return transformer.with_hybrid(self.layers, self.field)


def fresh_entries(config: McaModelConfig, plan: Plan) -> list[Entry]:
    """Tensors of the hybrid that the source has no part of."""
    planned = plan.by_target()
    return [entry for entry in entries(config) if entry.mca not in planned]


def written_as(config: McaModelConfig, plan: Plan) -> McaModelConfig:
    """The hybrid's config with the source's dtypes under the names that an export of the hybrid has."""
    config = plan.config(config)
    exported = {entry.mca: entry for entry in entries(config)}
    names = {
        source: own for entry in plan.entries for source, own in zip(entry.hf, exported[entry.mca].hf, strict=True)
    }
    dtypes = {names[name]: dtype for name, dtype in plan.dtype_exceptions.items() if name in names}
    fresh = [entry for entry in exported.values() if entry.mca.endswith(KEPT_IN_FP32)]
    if plan.dtype != "float32":
        dtypes |= {name: "float32" for entry in fresh for name in entry.hf}
    copies = weights_family(config).copies_of(config)
    return replace(
        config,
        source_dtype_exceptions=dtypes,
        source_copies=tuple(name for name in plan.copies if name in copies),
    )


class FreshTensors:
    """The fresh tensors of a translation, drawn when they are asked for; a thread keeps the last one it drew."""

    def __init__(self, config: McaModelConfig, translation: Translation, dtype: torch.dtype) -> None:
        self._config, self._translation, self._dtype = config, translation, dtype
        self._drawn = threading.local()

    def dtype(self, name: str) -> torch.dtype:
        """In which a checkpoint has the tensor."""
        return fresh_dtype(name, self._dtype)

    def part(self, entry: Entry, suffix: str) -> torch.Tensor:
        """The part of an entry's tensor that a checkpoint stores under this suffix."""
        if getattr(self._drawn, "name", None) != entry.mca:
            seed, mode = self._translation.seed, self._translation.fresh_layers
            self._drawn.name = entry.mca
            self._drawn.value = fresh_tensor(self._config, entry.mca, seed, mode).to(self.dtype(entry.mca))
        rows: Mapping[str, int] = {name: shape[0] for name, shape in entry.mapping.stored_parts(self._config)}
        start = sum(count for name, count in list(rows.items())[: list(rows).index(suffix)])
        return self._drawn.value[start : start + rows[suffix]]
