"""Pairs of answers in packed micro batches: log-probabilities of documents, and the objective made of them.

A row of a preference data set holds pairs: documents in turns the chosen and the rejected answer to one prompt. Each
document's log-probability is a sum over its own tokens, wherever in the pack it lies. Under context parallelism every
rank holds a part of each document: the parts are summed over the ranks, and the loss, which is not linear in them, is
computed from the sum on every rank. Its gradient then belongs to each rank's own part alone, so the reduction passes
it on as it is; Megatron sums gradients over these ranks afterwards. The first of them counts and reports a pair.

Legend: S tokens of this rank, D documents of the micro batch, P = D / 2 pairs.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

from mca_lib.data.token_store import IGNORE_INDEX, Row
from mca_lib.trainers.batches import MicroBatch
from mca_lib.trainers.loss import SummedLoss
from mca_lib.trainers.preference import Answers, PreferenceArguments, preference_losses


@dataclass(frozen=True)
class PairBatch(MicroBatch):
    """A micro batch whose documents are the chosen and the rejected answers, in turns."""

    lengths: list[int]
    """Tokens of this rank that each document has, padding included, and at the end those that belong to none."""
    documents_D: torch.Tensor
    """int64: numbers of the documents in their split."""
    scored_D: torch.Tensor
    """int64: scored tokens of each document, over all context parallel ranks."""
    reference_D: torch.Tensor
    """float64: log-probability of each document by the reference model; 0 without one."""

    @classmethod
    def of(cls, batch: MicroBatch, rows: Sequence[Row], reference: np.ndarray | None, context_size: int) -> "PairBatch":
        """`reference`: log-probability of each document of the split, or None."""
        documents_D = np.concatenate([np.zeros(0, dtype=np.int64), *(row.documents for row in rows)])
        scored_D = [
            int((labels != IGNORE_INDEX).sum())
            for row in rows
            for labels in np.split(row.labels, np.cumsum(row.document_lengths)[:-1])
        ]
        reference_D = np.zeros(len(documents_D)) if reference is None else reference[documents_D]
        assert not np.isnan(reference_D).any(), "documents whose reference was not computed"
        bounds = batch.packed.cu_seqlens_q.tolist()
        lengths = [(after - before) // context_size for before, after in itertools.pairwise(bounds)]
        device = batch.input_ids_1S.device
        return cls(
            **vars(batch),
            lengths=lengths,
            documents_D=torch.from_numpy(documents_D).to(device),
            scored_D=torch.tensor(scored_D, dtype=torch.int64, device=device),
            reference_D=torch.from_numpy(reference_D).to(device),
        )


def document_logps(losses_1S: torch.Tensor, batch: PairBatch) -> torch.Tensor:
    """float64 [D]: log-probability of each document's scored tokens, over all context parallel ranks.

    Tokens that are not scored are left out, not multiplied by 0: their loss may be infinite.
    """
    logps_S = torch.where(batch.loss_mask_1S, -losses_1S, 0.0)[0].double()
    logps_D = torch.stack([part.sum() for part in logps_S.split(batch.lengths)])[: len(batch.scored_D)]
    group = parallel_state.get_context_parallel_group()
    # It reduces in place, and this tensor is part of the graph.
    return reduce_from_tensor_model_parallel_region(logps_D.clone(), group=group)


class PairObjective:
    """Mean of a preference loss over all pairs of a step."""

    measures = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
    )

    def __init__(self, args: PreferenceArguments) -> None:
        self.args = args

    def __call__(self, losses_1S: torch.Tensor, batch: PairBatch) -> SummedLoss:
        logps_D, scored_D, reference_D = document_logps(losses_1S, batch), batch.scored_D, batch.reference_D
        chosen, rejected = (Answers(logps_D[i::2], scored_D[i::2], reference_D[i::2]) for i in (0, 1))
        pairs = preference_losses(self.args, chosen, rejected)
        loss_sum = pairs.loss_P.sum()
        sums = (
            pairs.chosen_rewards_P.sum(),
            pairs.rejected_rewards_P.sum(),
            (pairs.chosen_rewards_P > pairs.rejected_rewards_P).sum(),
            (pairs.chosen_rewards_P - pairs.rejected_rewards_P).sum(),
            pairs.chosen_scores_P.sum(),
            pairs.rejected_scores_P.sum(),
        )
        counts = int(parallel_state.get_context_parallel_rank() == 0)
        count = torch.tensor(counts * len(pairs.loss_P), dtype=torch.int32, device=losses_1S.device)
        report = {"loss_sum": loss_sum.detach(), "count": count, **dict(zip(self.measures, sums, strict=True))}
        return SummedLoss(loss_sum.float(), count, {name: counts * value.double() for name, value in report.items()})


class LogProbabilities:
    """No loss: reports the log-probability of each document."""

    measures = ()

    def __call__(self, losses_1S: torch.Tensor, batch: PairBatch) -> SummedLoss:
        logps_D = document_logps(losses_1S, batch).detach()
        nothing = torch.zeros((), device=losses_1S.device)
        return SummedLoss(nothing, nothing.int(), {"documents_D": batch.documents_D, "logps_D": logps_D})
