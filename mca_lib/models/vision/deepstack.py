"""Features of images that are added after the first layers of the language model (https://arxiv.org/abs/2406.04334).

Megatron hands the argument `context` of a block to every layer, through recomputation and back; a decoder-only layer
passes it on untouched. Here it holds what the first layers add, [layers, S, B, H], 0 where there is no image.
"""

from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer


class DeepStackLayer(TransformerLayer):
    """Megatron's layer, with features of images added to its output where it is one of the first."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See Megatron's."""
        hidden_SBH, added_LSBH = super().forward(*args, **kwargs)
        if added_LSBH is not None and self.layer_number <= len(added_LSBH):
            hidden_SBH = hidden_SBH + added_LSBH[self.layer_number - 1]
        return hidden_SBH, added_LSBH
