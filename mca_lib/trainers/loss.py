"""The loss contract: every loss returns a sum and a count, and the division happens once, over the global batch.

So the loss and its gradient do not depend on the micro batch size, on packing, or on how ranks share the batch: a
token (or, where answers are compared, a pair) weighs the same wherever it is. Megatron-Core divides when
`calculate_per_token_loss` is set: gradients are summed over replicas and context parallel ranks, then divided by the
counts of the whole step.
"""

from typing import NamedTuple, Protocol

import torch

from mca_lib.trainers.batches import MicroBatch


class SummedLoss(NamedTuple):
    """What a loss function hands to Megatron's schedule, in its order."""

    loss_sum: torch.Tensor
    """fp32 scalar with gradient: sum over what this rank counts, undivided."""
    count: torch.Tensor
    """int32 scalar: tokens or pairs that are in the sum. Over all ranks each of them is counted once."""
    report: dict[str, torch.Tensor]
    """Detached, for the log: loss_sum, count and the objective's measures, float64 scalars to be summed over ranks."""


class Objective(Protocol):
    """What a training minimizes. Called on the last pipeline stage, once per micro batch."""

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of further sums in the reports, logged as means per count."""

    def __call__(self, losses_1S: torch.Tensor, batch: MicroBatch) -> SummedLoss:
        """`losses_1S`: fp32, minus the log-probability of each label of this rank."""


class TokenObjective:
    """Mean of the losses of all tokens that have a label: pretraining and supervised fine-tuning."""

    measures = ()

    def __call__(self, losses_1S: torch.Tensor, batch: MicroBatch) -> SummedLoss:
        return token_loss(losses_1S, batch.loss_mask_1S)


def token_loss(losses_1S: torch.Tensor, loss_mask_1S: torch.Tensor) -> SummedLoss:
    """Sum of the per-token losses [1, S] under the mask [1, S].

    Tokens without loss are left out, not multiplied by 0: their value may be infinite.
    """
    loss_sum = losses_1S.float()[loss_mask_1S].sum()
    count = loss_mask_1S.sum(dtype=torch.int32)
    return SummedLoss(loss_sum, count, {"loss_sum": loss_sum.detach().double(), "count": count.double()})
