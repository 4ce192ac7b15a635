"""`McaVisionModel`: a transformer of Megatron that sees images.

    model(input_ids_BS, position_ids, ..., images=Images, image_index_BS=...)

`position_ids` are [B, S] of this rank's tokens where the axes do not differ, or [3, B, T] of the whole row over all
context parallel ranks; every pipeline stage needs them. `image_index_BS` says which feature a token of this rank stands
for, counted over all images of the micro batch, and -1 for text. A micro batch without images brings neither.

B batch, S tokens on this rank, T over all context parallel ranks, F features of images, H hidden size.
"""

import itertools
from collections.abc import Callable
from typing import Any, Self

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from mca_lib.models.config import McaModelConfig
from mca_lib.models.gpt import McaGPTModel
from mca_lib.models.packing import document_bounds, zigzag_index
from mca_lib.models.vision.images import Images
from mca_lib.models.vision.part import AXES
from mca_lib.models.vision.rotary import ThreeAxesRotaryEmbedding
from mca_lib.models.vision.tower import VisionTower, build_tower


class McaVisionModel(McaGPTModel):
    """One model chunk; the first of the pipeline has the tower, as `vision_model`."""

    def __init__(self, mca_config: McaModelConfig, config: TransformerConfig, *, vp_stage: int | None = None) -> None:
        super().__init__(mca_config, config, vp_stage=vp_stage)
        self.rotary_pos_emb = ThreeAxesRotaryEmbedding(mca_config)
        self.vision_model: torch.nn.Module | None = None
        if self.pre_process:
            self.vision_model = build_tower(mca_config, config)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        images: Images | None = None,
        image_index_BS: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """See the module's docstring; further arguments are those of `McaLanguageModel`."""
        if self.pre_process:
            hidden_SBH, added_LSBH = self._embedded(input_ids, images, image_index_BS)
            kwargs |= {"decoder_input": hidden_SBH, "extra_block_kwargs": {"context": added_LSBH}}
        return super().forward(
            input_ids, position_ids, attention_mask, *args, packed_seq_params=packed_seq_params, **kwargs
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Moves and casts the model; frequencies stay fp32, or angles in bf16 would be off by a quarter turn."""
        modules = [] if self.vision_model is None else self.vision_model.modules()
        kept = [(m, n, b) for m in modules for n, b in m.named_buffers(recurse=False) if n.endswith("inv_freq")]
        super()._apply(fn, recurse)
        for module, name, frequencies in kept:
            setattr(module, name, frequencies.to(getattr(module, name).device))
        return self

    def _embedded(
        self, input_ids_BS: torch.Tensor, images: Images | None, image_index_BS: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Input of the first layer [S, B, H], and what the first layers add [layers, S, B, H] or None."""
        tower = VisionTower(self.mca_config, self.vision_model)
        hidden_SBH = self.embedding(input_ids=input_ids_BS, position_ids=None)
        if images is None or not images.grids:
            return self._split(tower.without_images(hidden_SBH)), None
        features_LFH = tower.encode(images)
        index_SB = image_index_BS.T.to(hidden_SBH.device)
        is_image_SB = index_SB >= 0
        taken_LFH = features_LFH.index_select(1, index_SB[is_image_SB]).to(hidden_SBH.dtype)
        first_FH, *others = taken_LFH.unbind()
        mask_SB1 = is_image_SB.unsqueeze(-1)
        hidden_SBH = hidden_SBH.masked_scatter(mask_SB1, first_FH)
        added = [torch.zeros_like(hidden_SBH).masked_scatter(mask_SB1, features_FH) for features_FH in others]
        return self._split(hidden_SBH), torch.stack([self._split(a) for a in added]) if added else None

    def _split(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """This rank's tokens, under sequence parallelism."""
        return scatter_to_sequence_parallel_region(hidden_SBH) if self.config.sequence_parallel else hidden_SBH

    def _preprocess(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Megatron's, with the angles of this model's rotary embedding."""
        decoder_input, _, *others = super()._preprocess(
            input_ids, position_ids, *args, packed_seq_params=packed_seq_params, **kwargs
        )
        positions_3BT = self._positions(position_ids, packed_seq_params)
        return decoder_input, self.rotary_pos_emb(positions_3BT), *others

    def _positions(self, position_ids: torch.Tensor, packed: PackedSeqParams | None) -> torch.Tensor:
        """Positions as attention wants the angles: of the whole row where it is packed, else of this rank's tokens."""
        ranks = self.config.context_parallel_size
        if position_ids.ndim == 2:
            if packed is not None and ranks > 1:
                bounds = document_bounds(packed)
                lengths = [b - a for a, b in itertools.pairwise(bounds)]
                position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
            return position_ids.expand(AXES, *position_ids.shape)
        if packed is not None or ranks == 1:
            return position_ids
        index = zigzag_index([0, position_ids.shape[-1]], ranks)[parallel_state.get_context_parallel_rank()]
        return position_ids.index_select(-1, index.to(position_ids.device))
