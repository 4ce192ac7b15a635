"""Rows of the token store → one packed sequence per micro batch, as this rank sees it.

All documents of a micro batch lie end to end in one sequence of the `thd` format, and attention is told where each
one ends (`cu_seqlens`), so documents never see each other, whether they come from one row or from several. Lengths
are padded only where the layout asks for it; a padding token has no loss, and padding at the end is a document of
its own.

Legend: S tokens of this rank, T tokens of the micro batch over all context parallel ranks, D documents.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from mca_lib.data.token_store import IGNORE_INDEX, Row
from mca_lib.models.packing import packed_row, zigzag_index
from mca_lib.parallel import DistributingParallelArguments

PADDING_TOKEN = 0
FP8_TOKENS = 16
"""Transformer Engine's FP8 products want a multiple of this on each rank."""


@dataclass(frozen=True)
class Alignment:
    """What the parallel layout asks of lengths."""

    document: int
    """Every document's length divides by this: two chunks per context parallel rank."""
    sequence: int
    """The whole sequence's length divides by this."""

    @classmethod
    def of(cls, args: DistributingParallelArguments) -> "Alignment":
        context = args.context_parallel_size
        document = 2 * context if context > 1 else 1
        ranks = context * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
        tokens = FP8_TOKENS if getattr(args, "fp8", None) else 1
        return cls(document, math.lcm(document, ranks * tokens))

    def documents(self, lengths_D: np.ndarray) -> np.ndarray:
        """Padded length of each document."""
        return -(-lengths_D // self.document) * self.document

    def length(self, rows: Sequence[Row]) -> int:
        """Tokens of the sequence that holds these rows, at least one unit."""
        total = sum(int(self.documents(row.document_lengths).sum()) for row in rows)
        return max(1, math.ceil(total / self.sequence)) * self.sequence


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of this rank."""

    input_ids_1S: torch.Tensor
    """int64."""
    labels_1S: torch.Tensor
    """int64, shifted; 0 where there is no loss, since the loss kernels index with it."""
    loss_mask_1S: torch.Tensor
    """bool: this token's label counts."""
    position_ids_1S: torch.Tensor
    """int64, from 0 in each document."""
    rows_1S: torch.Tensor
    """int64: which row of the micro batch the token belongs to, from 1; 0 for padding."""
    packed: PackedSeqParams
    """Bounds of the documents in the whole sequence of T tokens."""
    num_tokens: int
    """Tokens of the micro batch that are no padding, over all context parallel ranks."""

    @property
    def positions(self) -> torch.Tensor:
        """Of the tokens, as the model takes them."""
        return self.position_ids_1S

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Further arguments of the model."""
        return {}


def collate(
    rows: Sequence[Row], length: int, alignment: Alignment, device: torch.device, context_rank: int, context_size: int
) -> MicroBatch:
    """Lay the documents of `rows` end to end in `length` tokens and take this context parallel rank's share."""
    input_ids_T = np.full(length, PADDING_TOKEN, dtype=np.int64)
    labels_T = np.full(length, IGNORE_INDEX, dtype=np.int64)
    position_ids_T = np.zeros(length, dtype=np.int64)
    rows_T = np.zeros(length, dtype=np.int64)
    bounds = [0]
    for number, row in enumerate(rows, 1):
        begin = 0
        for real, padded in zip(row.document_lengths, alignment.documents(row.document_lengths), strict=True):
            source, target = slice(begin, begin + real), slice(bounds[-1], bounds[-1] + real)
            input_ids_T[target] = row.input_ids[source]
            labels_T[target] = row.labels[source]
            rows_T[target] = number
            position_ids_T[bounds[-1] : bounds[-1] + padded] = np.arange(padded)
            bounds.append(bounds[-1] + int(padded))
            begin += real
    if bounds[-1] < length:
        position_ids_T[bounds[-1] :] = np.arange(length - bounds[-1])
        bounds.append(length)

    def share(values_T: np.ndarray) -> torch.Tensor:
        tensor_T = torch.from_numpy(values_T)
        if context_size > 1:
            tensor_T = tensor_T[zigzag_index(bounds, context_size)[context_rank]]
        return tensor_T.unsqueeze(0).to(device)

    labels_1S = share(labels_T)
    mask_1S = labels_1S != IGNORE_INDEX
    return MicroBatch(
        input_ids_1S=share(input_ids_T),
        labels_1S=labels_1S.masked_fill(~mask_1S, 0),
        loss_mask_1S=mask_1S,
        position_ids_1S=share(position_ids_T),
        rows_1S=share(rows_T),
        packed=packed_row(bounds, device),
        num_tokens=sum(len(row.input_ids) for row in rows),
    )
