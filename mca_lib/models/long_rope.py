"""The rotary embedding of LongRoPE: a document with more tokens than the original context has other frequencies.

Megatron (0.19.2) has one set for all. Angles of packed rows are those of every document, end to end: where there are as
many as the row has tokens, Megatron takes a document's from its own place.

S tokens of the longest document or row, T of the row over all ranks, D channels of a head that rotate.
"""

import copy
import itertools
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from torch.distributed import ProcessGroup

from mca_lib.models.config import LongRope, McaModelConfig
from mca_lib.models.packing import document_bounds
from mca_lib.models.rotary import long_frequencies


class LongRotaryEmbedding(torch.nn.Module):
    """In place of a model's `RotaryEmbedding`, which has the frequencies of short documents."""

    def __init__(self, short: RotaryEmbedding, config: McaModelConfig) -> None:
        super().__init__()
        assert isinstance(config.rope_scaling, LongRope), config.rope_scaling
        self.original_length = config.rope_scaling.original_max_position_embeddings
        self.short, self.long = short, copy.copy(short)
        self.long.inv_freq = long_frequencies(config).to(short.inv_freq.device)
        self._bounds: list[int] = []
        """Of the documents of the row that is on its way: Megatron asks for its length, then for the angles."""

    @property
    def inv_freq(self) -> torch.Tensor:
        """Frequencies of short documents."""
        return self.short.inv_freq

    def get_rotary_seq_len(self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any) -> int:
        """Tokens that need angles, over all context parallel ranks: T of a packed row, else S."""
        *args, packed = (*args, packed_seq_params) if len(args) < 5 else args
        if packed is None:
            return self.short.get_rotary_seq_len(*args, packed_seq_params=None, **kwargs)
        self._bounds = document_bounds(packed)
        return self._bounds[-1]

    def forward(
        self, length: int, offset: int = 0, packed_seq: bool = False, cp_group: ProcessGroup | None = None
    ) -> torch.Tensor:
        """Angles [T, 1, 1, D] of a packed row, else [S, 1, 1, D], of which a context parallel rank has its part."""
        if packed_seq:
            lengths = [stop - start for start, stop in itertools.pairwise(self._bounds)]
            return torch.cat([self._angles(n) for n in lengths if n])
        angles = self._angles(length)
        group = cp_group if cp_group is not None else self.short.cp_group
        return get_pos_emb_on_this_cp_rank(angles, 0, group) if group is not None and group.size() > 1 else angles

    def _angles(self, length: int) -> torch.Tensor:
        return (self.long if length > self.original_length else self.short).get_emb(length)
