"""A token store as the data set of transformers' Trainer: item i is one micro batch of the run.

    step 0: micro batch 0 of rank 0, of rank 1, …, micro batch 1 of rank 0, …    step 1: …

Read in order by W ranks in turns, that is how `Schedule` and `BatchShape` deal the rows to W replicas: the same rows in
the same step as on Megatron-Core, without padding to a common length. A short step at the end of an epoch is filled up
with items that weigh nothing.

    tokens   [1, S]   the documents of the rows end to end. `position_ids` start anew in each, which is how
                      transformers (5.24) knows a packed sequence: it masks by document, or tells flash attention where
                      each one begins. LLaMA-Factory's neat packing makes a mask of fp32 in place of one of bits
    pairs    [2P, S]  P chosen answers, then the P rejected ones, padded on the right: LLaMA-Factory's loss of pairs
                      wants them so. Causal attention never looks at what follows, so no mask is needed

Labels of tokens are shifted already, by the row: its last one may be a token that the row does not have. Labels of
pairs are not: LLaMA-Factory shifts them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from mca_lib.data.indexed_rows import Rows
from mca_lib.data.token_store import IGNORE_INDEX, Row
from mca_lib.trainers.schedule import BatchShape

PADDING_TOKEN = 0
PAIRS = "pairs"
"""Name of what an item weighs, among the tensors of a batch of pairs."""

type Item = dict[str, torch.Tensor]


def token_item(store: Rows, rows: Sequence[int]) -> Item:
    """input_ids, shift_labels, labels, position_ids [1, S]; without rows one token without a label."""
    nothing = Row(*(np.array([value]) for value in (PADDING_TOKEN, IGNORE_INDEX, 0, 1, 0)))
    loaded = [store[row] for row in rows] or [nothing]
    item = {
        name: torch.from_numpy(np.concatenate([getattr(row, name) for row in loaded])).unsqueeze(0)
        for name in ("input_ids", "labels", "position_ids")
    }
    # The loss takes these as they are; that there are `labels` is what asks for a loss.
    return item | {"shift_labels": item["labels"]}


def pair_item(store: Rows, rows: Sequence[int]) -> Item:
    """input_ids, labels [2P, S] and the number of pairs [1]; without rows a pair of two tokens that is not counted."""
    documents = [int(d) for row in rows for d in store[row].documents]
    answers = [store.document(d) for d in (*documents[0::2], *documents[1::2])]
    if not answers:
        # A label in each, so that a mean over the labels is finite.
        answers = [(np.full(2, PADDING_TOKEN), np.array([False, True]))] * 2
    longest = max(len(tokens) for tokens, _ in answers)
    ids_DS = np.full((len(answers), longest), PADDING_TOKEN, dtype=np.int64)
    labels_DS = np.full_like(ids_DS, IGNORE_INDEX)
    for index, (tokens, mask) in enumerate(answers):
        ids_DS[index, : len(tokens)] = tokens
        labels_DS[index, : len(tokens)] = np.where(mask, tokens, IGNORE_INDEX)
    return {
        "input_ids": torch.from_numpy(ids_DS),
        "labels": torch.from_numpy(labels_DS),
        PAIRS: torch.tensor([len(documents) // 2]),
    }


@dataclass(frozen=True)
class Counts:
    """Of one step, over all ranks."""

    lengths_D: np.ndarray
    """Tokens of each document."""
    loss_tokens: int

    @property
    def tokens(self) -> int:
        return int(self.lengths_D.sum())

    @property
    def pairs(self) -> int:
        return len(self.lengths_D) // 2


class MicroBatches(Dataset):
    """The items of `steps` steps.

    Args:
        store: rows.
        shape: how a step is dealt.
        rows_of: step → its rows.
        steps: how many.
        make_item: `token_item` or `pair_item`.
    """

    def __init__(
        self,
        store: Rows,
        shape: BatchShape,
        rows_of: Callable[[int], Sequence[int]],
        steps: int,
        make_item: Callable[[Rows, Sequence[int]], Item],
    ) -> None:
        self.store, self.shape, self.rows_of, self.steps, self.make_item = store, shape, rows_of, steps, make_item

    @property
    def per_step(self) -> int:
        """Micro batches of each rank in a step."""
        return self.shape.global_batch_size // (self.shape.micro_batch_size * self.shape.data_parallel_size)

    def __len__(self) -> int:
        return self.steps * self.per_step * self.shape.data_parallel_size

    def __getitem__(self, index: int) -> Item:
        step, place = divmod(index, self.per_step * self.shape.data_parallel_size)
        micro_batch, rank = divmod(place, self.shape.data_parallel_size)
        dealt = self.shape.deal(self.rows_of(step), rank)
        rows = dealt[micro_batch] if micro_batch < len(dealt) else []
        return self.make_item(self.store, [row for row in rows if row is not None])

    def counts(self, step: int) -> Counts:
        """What the whole step counts, so that no rank has to be asked."""
        rows = [self.store[row] for row in self.rows_of(step)]
        return Counts(
            lengths_D=np.concatenate([row.document_lengths for row in rows]),
            loss_tokens=sum(int((row.labels != IGNORE_INDEX).sum()) for row in rows),
        )


def evaluation(
    store: Rows, rows_per_rank: int, ranks: int, make_item: Callable[[Rows, Sequence[int]], Item]
) -> MicroBatches:
    """Every row once, in order; a step is one micro batch of each rank."""
    shape = BatchShape(rows_per_rank * ranks, rows_per_rank, ranks)
    size = shape.global_batch_size

    def rows_of(step: int) -> range:
        return range(step * size, min((step + 1) * size, len(store)))

    return MicroBatches(store, shape, rows_of, math.ceil(len(store) / size), make_item)
