"""The loss contract: every loss returns a sum and a count, and the division happens once, over the global batch.

So the loss and its gradient do not depend on the micro batch size, on packing, or on how ranks share the batch: a
token weighs the same wherever it is. Megatron-Core divides when `calculate_per_token_loss` is set: gradients are
summed over replicas and context parallel ranks, then divided by the number of tokens of the whole step.
"""

from typing import NamedTuple

import torch


class TokenLoss(NamedTuple):
    """What a loss function hands to Megatron's schedule, in its order."""

    loss_sum: torch.Tensor
    """fp32 scalar with gradient: sum over this rank's tokens, undivided."""
    num_tokens: torch.Tensor
    """int32 scalar: tokens that are in the sum."""
    report: dict[str, torch.Tensor]
    """Detached, for the log: loss_sum and num_tokens in float64."""


def token_loss(losses_1S: torch.Tensor, loss_mask_1S: torch.Tensor) -> TokenLoss:
    """Sum of the per-token losses [1, S] under the mask [1, S].

    Tokens without loss are left out, not multiplied by 0: their value may be infinite.
    """
    loss_sum = losses_1S.float()[loss_mask_1S].sum()
    num_tokens = loss_mask_1S.sum(dtype=torch.int32)
    return TokenLoss(loss_sum, num_tokens, {"loss_sum": loss_sum.detach().double(), "num_tokens": num_tokens.double()})
