"""`McaLanguageModel`: what `McaGPTModel` and `McaHybridModel` do alike, whatever their layers are.

Interface of `forward`, which is Megatron's:

    model(input_ids_BS, position_ids_BS, attention_mask=None, labels=labels_BS, packed_seq_params=...)

Labels are already shifted by the caller. The last pipeline stage returns the loss of each token, fp32 [B, S], or
without labels the logits of this rank's share of the vocabulary; other stages return hidden states. Rows that pack
documents have B = 1 and bring `PackedSeqParams(qkv_format="thd", ...)`.

B batch, S tokens on this rank, V share of the vocabulary.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from mca_lib.converter.mappings import padded_vocab_size
from mca_lib.models.config import LongRope, McaModelConfig
from mca_lib.models.long_rope import LongRotaryEmbedding
from mca_lib.models.model_factory import PretrainedModel
from mca_lib.models.packing import cover_row
from mca_lib.models.rotary import model_frequencies

if TYPE_CHECKING:
    from mca_lib.adapters.adapters import Adapters


class McaLanguageModel(PretrainedModel):
    """Mixed into a language model of Megatron, before it."""

    config_class = McaModelConfig

    def _finish_init(self, mca_config: McaModelConfig) -> None:
        """To be called at the end of a constructor."""
        self.mca_config = mca_config
        if self.pre_process:
            self.embedding.embedding_dropout.p = 0.0  # Megatron gives it that of the residual; transformers has none
            if mca_config.embedding_multiplier != 1:
                multiplier = torch.tensor(mca_config.embedding_multiplier)
                self.embedding.register_forward_hook(lambda _, __, found: found * multiplier.to(found.dtype))
        self.adapters: Adapters | None = None
        """Of LoRA, which then are all that is trained; see `mca_lib.adapters`."""
        if self.position_embedding_type == "rope" and mca_config.latent_attention is None:
            self.rotary_pos_emb.inv_freq = model_frequencies(mca_config).to(self.rotary_pos_emb.inv_freq.device)
            if isinstance(mca_config.rope_scaling, LongRope):
                self.rotary_pos_emb = LongRotaryEmbedding(self.rotary_pos_emb, mca_config)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """See the module's docstring; further arguments are those of Megatron's model."""
        if packed_seq_params is not None:
            packed_seq_params = self._packed(packed_seq_params, self._row_length(input_ids))
        return super().forward(
            input_ids, position_ids, attention_mask, *args, packed_seq_params=packed_seq_params, **kwargs
        )

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Cross entropy, fp32 [B, S]; rows of the vocabulary that are padding have no probability.

        Megatron lets padding take part, so that its loss depends on the tensor parallel size.
        """
        if padding := self.padding_rows:
            is_padding_V = torch.arange(logits.shape[-1], device=logits.device) >= logits.shape[-1] - padding
            logits = logits.masked_fill(is_padding_V, float("-inf"))
        return super().compute_language_model_loss(labels, logits)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Moves and casts the model; the experts' biases stay fp32, or their small steps would be rounded away."""
        kept = {m: m.expert_bias for m in self.modules() if getattr(m, "expert_bias", None) is not None}
        super()._apply(fn, recurse)
        for router, bias in kept.items():
            router.expert_bias = bias.to(router.expert_bias.device)
        return self

    @property
    def padding_rows(self) -> int:
        """Rows at the end of this rank's share of the vocabulary that no token has."""
        share = self.vocab_size // self.config.tensor_model_parallel_size
        end = (parallel_state.get_tensor_model_parallel_rank() + 1) * share
        return min(share, max(0, end - self.mca_config.vocab_size))

    def _packed(self, packed: PackedSeqParams, length: int) -> PackedSeqParams:
        """The documents of a row of `length` tokens, over all context parallel ranks, as the layers need them."""
        return cover_row(packed, length)

    def _row_length(self, input_ids: torch.Tensor | None) -> int:
        """Tokens of the row over all context parallel ranks; later pipeline stages may have no ids."""
        context = self.config.context_parallel_size
        if input_ids is not None:
            return input_ids.shape[1] * context
        split = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        return self.decoder.input_tensor.shape[0] * split * context


def model_arguments(mca_config: McaModelConfig, config: TransformerConfig, vp_stage: int | None) -> dict[str, Any]:
    """Arguments that Megatron's constructors share."""
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    chunks = config.virtual_pipeline_model_parallel_size
    return {
        "config": config,
        "vocab_size": padded_vocab_size(mca_config.vocab_size, config.tensor_model_parallel_size),
        "max_sequence_length": mca_config.max_position_embeddings,
        "pre_process": is_vp_first_stage(vp_stage, chunks) and is_pp_first_stage(pipeline),
        "post_process": is_vp_last_stage(vp_stage, chunks) and is_pp_last_stage(pipeline),
        "parallel_output": True,
        "share_embeddings_and_output_weights": mca_config.tie_word_embeddings,
        # Positions of three axes: `mca_lib.models.vision.model` has a rotary embedding of its own.
        "position_embedding_type": "rope" if mca_config.rotary and mca_config.vision is None else "none",
        # Images take the places of tokens in whole rows, which are split between the ranks afterwards.
        "scatter_embedding_sequence_parallel": mca_config.vision is None,
        "rotary_base": mca_config.rotary_base,
        "rotary_percent": mca_config.rotating_channels / mca_config.kv_channels,
        "vp_stage": vp_stage,
    }
