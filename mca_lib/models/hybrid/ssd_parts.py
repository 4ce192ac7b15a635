"""The two sums of the scan that autograd alone would make slow: their gradients are written out.

`decayed_attention` holds Q² numbers per head only for a few chunks at a time and makes them again on the way back.
`states_before_chunks` writes every state once. Which document a token belongs to enters as 0 or -inf, added to the
logarithm of a decay.

Dimensions are named in `ssd`; Z: chunks of all rows of the batch, B·K.
"""

import math
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

# Entries of L that a pass works on. On CPU what fits a core's cache (1 MiB in fp32); elsewhere few launches.
BLOCK_ENTRIES = {"cpu": 2**18}
BLOCK_ENTRIES_ELSEWHERE = 2**28


@dataclass(frozen=True)
class Sight:
    """What sees what, as 0 or -inf in the logarithm of a decay; the number 0 where nothing is hidden."""

    within_ZQQ: torch.Tensor  # j before or at i, in the same document; [1, Q, Q] where all chunks are alike
    to_end_BK1Q: torch.Tensor | float  # a token and the chunk's last
    from_start_BK1Q: torch.Tensor | float  # the last token before the chunk, and a token
    through_BK1: torch.Tensor | float  # the last token before the chunk, and the chunk's last


def sight(seq_idx_BL: torch.Tensor | None, chunks: int, rows: int, like: torch.Tensor) -> Sight:
    """Of chunks of `rows` tokens; tokens beyond the last are the last's document. `like`: dtype and device."""
    later_QQ = torch.ones(rows, rows, dtype=torch.bool, device=like.device).triu(1)
    if seq_idx_BL is None:
        return Sight(_hide(later_QQ, like)[None], 0.0, 0.0, 0.0)
    added = chunks * rows - seq_idx_BL.shape[1]
    seq_BL = torch.cat([seq_idx_BL, seq_idx_BL[:, -1:].expand(-1, added)], 1)
    seq_BKQ = seq_BL.unflatten(1, (chunks, rows))
    last_BK = seq_BKQ[..., -1]
    before_BK = torch.cat([seq_BL[:, :1], last_BK[:, :-1]], 1)
    apart_BKQQ = seq_BKQ[..., :, None] != seq_BKQ[..., None, :]
    return Sight(
        _hide(apart_BKQQ | later_QQ, like).flatten(0, 1),
        _hide(seq_BKQ != last_BK[..., None], like).unsqueeze(2),
        _hide(seq_BKQ != before_BK[..., None], like).unsqueeze(2),
        _hide(last_BK != before_BK, like).unsqueeze(2),
    )


def _hide(hidden: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -math.inf)


def decayed_attention(
    scores_ZGQQ: torch.Tensor,
    log_decay_ZGRQ: torch.Tensor,
    x_ZQGRP: torch.Tensor,
    dt_ZQGR: torch.Tensor,
    hidden_ZQQ: torch.Tensor,
) -> torch.Tensor:
    """y_i = Σ_j L_ij · scores_ij · Δ_j x_j within each chunk, [Z, Q, G, R, P].

    L_ij = exp(log_decay_i - log_decay_j + hidden_ij). No gradient flows to `hidden_ZQQ`.
    """
    return _DecayedAttention.apply(scores_ZGQQ, log_decay_ZGRQ, x_ZQGRP, dt_ZQGR, hidden_ZQQ)


class _DecayedAttention(torch.autograd.Function):
    """With M = L ∘ scores, v = Δ x, W = (∂y vᵀ) ∘ L, G = W ∘ scores:

    ∂v = Mᵀ ∂y,   ∂scores = Σ_heads W,   ∂log_decay_i = Σ_j G_ij - Σ_j G_ji.
    """

    @staticmethod
    def forward(ctx, scores, log_decay, x, dt, hidden):
        ctx.save_for_backward(scores, log_decay, x, dt, hidden)
        y_ZQGRP = torch.empty_like(x, memory_format=torch.contiguous_format)
        for part in _blocks(log_decay):
            v_zGRQP = _values(x[part], dt[part])
            m_zGRQQ = _decay(log_decay[part], _of(hidden, part)).mul_(scores[part].unsqueeze(2))
            y_ZQGRP[part] = (m_zGRQQ @ v_zGRQP).permute(0, 3, 1, 2, 4)
        return y_ZQGRP

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_ZQGRP):
        scores, log_decay, x, dt, hidden = ctx.saved_tensors
        dscores, dlog_decay, dx, ddt = (torch.empty_like(t) for t in (scores, log_decay, x, dt))
        for part in _blocks(log_decay):
            v_zGRQP = _values(x[part], dt[part])
            dy_zGRQP = dy_ZQGRP[part].permute(0, 2, 3, 1, 4).contiguous()
            scores_zG1QQ = scores[part].unsqueeze(2)
            decay_zGRQQ = _decay(log_decay[part], _of(hidden, part))
            dv_zQGRP = ((decay_zGRQQ * scores_zG1QQ).mT @ dy_zGRQP).permute(0, 3, 1, 2, 4)
            dx[part] = dv_zQGRP * dt[part].unsqueeze(-1)
            ddt[part] = (dv_zQGRP * x[part]).sum(-1)
            w_zGRQQ = (dy_zGRQP @ v_zGRQP.mT).mul_(decay_zGRQQ)
            dscores[part] = w_zGRQQ.sum(2)
            g_zGRQQ = w_zGRQQ.mul_(scores_zG1QQ)
            dlog_decay[part] = g_zGRQQ.sum(-1) - g_zGRQQ.sum(-2)
        return dscores, dlog_decay, dx, ddt, None


def _values(x_zQGRP: torch.Tensor, dt_zQGR: torch.Tensor) -> torch.Tensor:
    return (x_zQGRP * dt_zQGR.unsqueeze(-1)).permute(0, 2, 3, 1, 4).contiguous()


def _decay(log_decay_zGRQ: torch.Tensor, hidden_zQQ: torch.Tensor) -> torch.Tensor:
    """L. Above the diagonal the difference is positive, but finite, so that -inf makes it 0."""
    difference = log_decay_zGRQ.unsqueeze(-1) - log_decay_zGRQ.unsqueeze(-2)
    return difference.add_(hidden_zQQ[:, None, None]).exp_()


def _of(hidden_ZQQ: torch.Tensor, part: slice) -> torch.Tensor:
    return hidden_ZQQ if len(hidden_ZQQ) == 1 else hidden_ZQQ[part]


def _blocks(log_decay_ZGRQ: torch.Tensor) -> list[slice]:
    """Slices of Z whose L has at most BLOCK_ENTRIES entries, one chunk at least."""
    entries = log_decay_ZGRQ[0].numel() * log_decay_ZGRQ.shape[-1]
    size = max(1, BLOCK_ENTRIES.get(log_decay_ZGRQ.device.type, BLOCK_ENTRIES_ELSEWHERE) // entries)
    return [slice(start, start + size) for start in range(0, len(log_decay_ZGRQ), size)]


def states_before_chunks(
    written_BKHPN: torch.Tensor, through_BKH: torch.Tensor, initial_BHPN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state before each chunk [B, K, H, P, N], and the one after the last [B, H, P, N].

    state_{k+1} = through_k · state_k + written_k, from `initial_BHPN` on.
    """
    return _StatePassing.apply(written_BKHPN, through_BKH, initial_BHPN)


class _StatePassing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, written, through, initial):
        batch, chunks, *rest = written.shape
        states = written.new_empty(batch, chunks + 1, *rest)
        states[:, 0] = initial
        for k in range(chunks):
            torch.addcmul(written[:, k], states[:, k], through[:, k, :, None, None], out=states[:, k + 1])
        ctx.save_for_backward(states, through)
        return states[:, :-1], states[:, -1]

    @staticmethod
    @once_differentiable
    def backward(ctx, dbefore, dstate):
        states, through = ctx.saved_tensors
        dwritten = torch.empty_like(dbefore)
        dthrough = torch.empty_like(through)
        for k in reversed(range(through.shape[1])):
            dwritten[:, k] = dstate
            dthrough[:, k] = (dstate * states[:, k]).sum((-1, -2))
            dstate = torch.addcmul(dbefore[:, k], dstate, through[:, k, :, None, None])
        return dwritten, dthrough, dstate
