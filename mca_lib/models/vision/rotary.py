"""Rotary embedding of positions with three axes.

Megatron's `MultimodalRotaryEmbedding` (0.19.2) has the sections in blocks alone, no scaling, and under context
parallelism cuts a row as if it were one document. Here the angles of a packed row are those of the whole row, of which
Megatron's attention takes each document's part (`_apply_rotary_pos_emb_thd`); of rows they are those of this rank.

B rows, S tokens, D half of a head's channels.
"""

import torch

from mca_lib.models.config import McaModelConfig
from mca_lib.models.rotary import inverse_frequencies


class ThreeAxesRotaryEmbedding(torch.nn.Module):
    """Angles of a head's channels, fp32 [S, B, 1, 2·D], from positions [3, B, S]."""

    def __init__(self, config: McaModelConfig) -> None:
        super().__init__()
        frequencies_D = inverse_frequencies(config.kv_channels, config.rotary_base, config.rope_scaling)
        axes_D = torch.tensor(config.vision.axes(len(frequencies_D)))
        self.register_buffer("inv_freq", frequencies_D, persistent=False)
        self.register_buffer("axes", axes_D, persistent=False)

    def _apply(self, fn, recurse: bool = True):
        """Moves; a cast to bf16 would round the frequencies."""
        frequencies_D = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = frequencies_D.to(self.inv_freq.device)
        return self

    def forward(self, positions_3BS: torch.Tensor) -> torch.Tensor:
        """See the class."""
        positions_DBS = positions_3BS.to(self.inv_freq.device).index_select(0, self.axes).float()
        angles_SBD = positions_DBS.permute(2, 1, 0) * self.inv_freq
        return torch.cat((angles_SBD, angles_SBD), dim=-1).unsqueeze(2)
