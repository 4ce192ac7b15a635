"""`McaGPTModel`: Megatron-Core's GPTModel, built from an `McaModelConfig`.

`McaLanguageModel` says what goes into `forward` and what comes out. In training, `loss_mask` [B, S] turns on the loss
of multi-token prediction, where the model has it: see `mca_lib.models.mtp`.

S tokens on this rank, B batch, H hidden size.
"""

import logging
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from mca_lib.models.config import McaModelConfig
from mca_lib.models.language_model import McaLanguageModel, model_arguments
from mca_lib.models.layer_spec import block_spec, mtp_spec
from mca_lib.models.mtp import add_mtp_loss

# Said at every construction: GPTModel takes fixes only, new features go to HybridModel. Neither matters here.
logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(
    lambda record: "GPTModel IS DEPRECATED" not in record.getMessage()
)


class McaGPTModel(McaLanguageModel, GPTModel):
    """One model chunk: all of the model, or the layers of one (virtual) pipeline stage.

    Args:
        mca_config: what the model is.
        config: how this rank runs it; one object shared by all chunks of the rank.
        vp_stage: number of the chunk within the rank, None when there is one.
    """

    def __init__(self, mca_config: McaModelConfig, config: TransformerConfig, *, vp_stage: int | None = None) -> None:
        super().__init__(
            transformer_layer_spec=block_spec(mca_config, config, vp_stage),
            mtp_block_spec=mtp_spec(mca_config),
            **model_arguments(mca_config, config, vp_stage),
        )
        self._finish_init(mca_config)

    def _postprocess(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor | None,
        loss_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        mtp_in_postprocess: bool = False,
        padding_mask: torch.Tensor | None = None,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        rotary_pos_emb: torch.Tensor | None,
        **_: Any,
    ) -> torch.Tensor:
        """Megatron's, for training and evaluation alone. Multi-token prediction runs where it has a loss: in training,
        with a `loss_mask` and without adapters."""
        if not self.post_process:
            return hidden_states
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None

        def logits(hidden_SBH: torch.Tensor) -> torch.Tensor:
            return self.output_layer(hidden_SBH, weight=weight)[0]

        def token_losses(hidden_SBH: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
            return self.compute_language_model_loss(labels_BS, logits(hidden_SBH))

        if labels is None:
            return logits(hidden_states).transpose(0, 1).contiguous()
        if mtp_in_postprocess and self.training and loss_mask is not None and self.adapters is None:
            if padding_mask is not None and padding_mask.shape != labels.shape:
                # Megatron has split it between the ranks of sequence parallelism; to be rolled it has to be whole.
                padding_mask = gather_from_sequence_parallel_region(padding_mask.T.contiguous(), False).T
            outputs = self.mtp(
                input_ids=input_ids,
                position_ids=position_ids,
                hidden_states=hidden_states,
                attention_mask=attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                padding_mask=padding_mask,
                embedding=self.embedding,
            )
            _, *predicted = outputs.chunk(1 + self.config.mtp_num_layers)
            hidden_states = add_mtp_loss(
                hidden_states,
                tuple(predicted),
                token_losses,
                labels,
                loss_mask,
                self.config,
                self.pg_collection.cp,
                packed_seq_params,
            )
        return token_losses(hidden_states, labels)
