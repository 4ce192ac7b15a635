"""Documents packed end to end into one row, and sequences shared between context parallel ranks.

Context parallelism cuts each document of padded length n into 2·C chunks; rank c holds chunks c and 2·C-1-c, so that
under a causal mask every rank has the same work:

    C = 2, one document of 8 tokens    rank 0: 0 1 6 7    rank 1: 2 3 4 5

T: tokens of the row over all ranks; C: context parallel ranks.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from mca_lib.errors import DataError


def document_bounds(packed: PackedSeqParams) -> list[int]:
    """Cumulative lengths of the documents with their padding, 0 first."""
    bounds = packed.cu_seqlens_q_padded if packed.cu_seqlens_q_padded is not None else packed.cu_seqlens_q
    return bounds.tolist()


def packed_row(bounds: list[int], device: torch.device) -> PackedSeqParams:
    """Megatron's description of documents that end at `bounds`, of which the first is 0."""
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        total_tokens=bounds[-1],
    )


def cover_row(packed: PackedSeqParams, length: int) -> PackedSeqParams:
    """The same documents, with trailing padding as one more document and `max_seqlen` as it really is.

    `length` is the row's over all context parallel ranks. Megatron's rotary embedding splits the row by `cu_seqlens`,
    so these must cover it. And it reads a `max_seqlen` that equals the row's length as "positions run on through the
    row" (megatron-core 0.19.2, `_apply_rotary_pos_emb_thd`): a document's logits would then depend, if only by
    rounding, on where in a row it lies.
    """
    bounds = document_bounds(packed)
    if bounds[-1] > length:
        raise DataError(f"packed documents end at token {bounds[-1]}, beyond the row's {length}")
    if bounds[-1] < length:
        bounds.append(length)
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=packed.cu_seqlens_q.device)
    return replace(
        packed,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def zigzag_index(bounds: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """For each context parallel rank, the row positions that it holds, in its order.

    Raises DataError when a document does not divide into 2·C chunks.
    """
    held: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for start, stop in itertools.pairwise(bounds):
        if (stop - start) % (2 * ranks):
            raise DataError(
                f"a sequence of {stop - start} tokens does not divide by 2 x context parallel size = {2 * ranks}; "
                "pad it"
            )
        chunks = torch.arange(start, stop).chunk(2 * ranks)
        for rank in range(ranks if stop > start else 0):
            held[rank] += [chunks[rank], chunks[2 * ranks - 1 - rank]]
    return [torch.cat(parts) for parts in held]
