"""The loss of multi-token prediction (https://arxiv.org/abs/2412.19437, section 2.2), as training adds it.

Layer k predicts, at a token that is followed by token i, token i+k. Its loss is summed over the tokens that have loss
and so far to go in their document, and like the main loss divided by all tokens with loss (equation 24). So it depends
neither on micro batches nor on the layout; Megatron's (0.19.2, `process_mtp_loss`) is divided by the tokens that a
context parallel rank's micro batch happens to hold.

B batch, S tokens on this rank, H hidden size.
"""

from collections.abc import Callable

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, roll_tensor
from megatron.core.transformer.transformer_config import TransformerConfig


def add_mtp_loss(
    hidden_SBH: torch.Tensor,
    predicted_SBH: tuple[torch.Tensor, ...],
    token_losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    labels_BS: torch.Tensor,
    loss_mask_BS: torch.Tensor,
    config: TransformerConfig,
    context_group: torch.distributed.ProcessGroup,
    packed: PackedSeqParams | None,
) -> torch.Tensor:
    """`hidden_SBH`, whose backward pass brings the gradient of the layers' losses too.

    Args:
        hidden_SBH: output of the main model.
        predicted_SBH: output of each multi-token prediction layer.
        token_losses: (hidden states, labels) → loss of each token, [B, S].
        loss_mask_BS: labels that count; the others may be anything.
    """
    mask_BS = loss_mask_BS.to(labels_BS.dtype)  # travels between context parallel ranks
    scale = config.mtp_loss_scaling_factor / len(predicted_SBH)
    for layer_SBH in predicted_SBH:
        labels_BS, _ = roll_tensor(labels_BS, cp_group=context_group, packed_seq_params=packed)
        mask_BS, _ = roll_tensor(mask_BS, cp_group=context_group, packed_seq_params=packed)
        losses_BS = token_losses(layer_SBH, labels_BS)
        hidden_SBH = MTPLossAutoScaler.apply(hidden_SBH, scale * losses_BS[mask_BS.bool()])
    return hidden_SBH
