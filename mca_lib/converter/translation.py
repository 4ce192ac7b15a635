"""A transformer's Hugging Face weights as a hybrid's: its own layers by the weight table, fresh ones by a seed.

source tensor ──(family's table, layers renumbered)──> attention, MLP, embeddings, norms
seed ──(models.hybrid.fresh)──────────────────────────> Mamba-2 layers
"""

import threading
from dataclasses import dataclass

import torch

from mca_lib.converter.plan import Plan, fresh_entries, stored_entries
from mca_lib.models.config import HybridLayers, McaModelConfig
from mca_lib.models.hybrid.fresh import FreshMode, fresh_dtype, fresh_tensor


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


class FreshTensors:
    """The fresh tensors of a translation, drawn when they are asked for; a thread keeps the last one that it drew.

    Args:
        config: of the hybrid.
        plan: of the transformer's weights.
    """

    def __init__(self, translation: Translation, config: McaModelConfig, plan: Plan) -> None:
        self._translation, self._config = translation, config
        self._dtype = getattr(torch, plan.dtype)
        pairs = [(e.mca, stored) for e in fresh_entries(config, plan) for stored in stored_entries(e, config)]
        self._whole = {stored.mca: whole for whole, stored in pairs}
        self.entries = {stored.mca: stored for _, stored in pairs}
        """By name of the tensor that a checkpoint stores."""
        self._drawn = threading.local()

    def dtype(self, name: str) -> torch.dtype:
        """In which a checkpoint has the tensor."""
        return fresh_dtype(self._whole[name], self._dtype)

    def read(self, name: str) -> torch.Tensor:
        """The tensor that a checkpoint stores under this name."""
        whole = self._whole[name]
        if getattr(self._drawn, "name", None) != whole:
            value = fresh_tensor(self._config, whole, self._translation.seed, self._translation.fresh_layers)
            self._drawn.name, self._drawn.value = whole, value.to(self.dtype(name))
        return self.entries[name].mapping.to_mca([self._drawn.value], self._config)
