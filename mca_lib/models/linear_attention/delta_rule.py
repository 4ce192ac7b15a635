"""The gated delta rule in plain PyTorch: what flash-linear-attention computes in Triton, with gradients, on any device.

One head of Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464, equation 10) has a state S [K, V]. A
token lets it decay by exp(g), g ≤ 0, reads what it holds under the key k, and moves that by β towards the token's
value v:

    S_t = exp(g_t) S_{t-1} + β_t k_t (v_t - exp(g_t) S_{t-1}ᵀ k_t)ᵀ          o_t = S_tᵀ q_t / √K

Tokens are cut into chunks, within which only products of matrices remain (section 3.3 there). With the decay
c_i = g_1 + … + g_i from before the chunk to its token i, D_ij = exp(c_i - c_j) for j ≤ i and 0 above, N the part of
D ∘ K Kᵀ below the diagonal, and S the state before the chunk:

    E  = (1 + N diag(β))⁻¹ (V - exp(c) K S)              by how much the state is wrong at each token
    O  = exp(c) Q S + (D ∘ Q Kᵀ) β E                     Q is divided by √K
    S' = exp(c_C) S + (exp(c_C - c) K)ᵀ β E

So time and memory are linear in the number of tokens, and the only loop is over chunks. Documents packed into one row
do not see each other: their entries in D are 0, and a state enters a chunk for the tokens of its own document alone.

B: batch, L: tokens, H: heads, K: channels of a query or key, V: of a value, N: chunks, C: tokens of a chunk,
X: heads of all rows, B·H.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from mca_lib.models.hybrid.ssd_parts import Sight, sight

CHUNK = 64
"""Tokens of a chunk: with heads of 128 channels the products within chunks cost what those with the state cost."""


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """o [B, L, H, V] in the dtype of `value`. Everything is computed in fp32, in fp64 where `value` is.

    Args:
        query, key: [B, L, H, K]; keys of length 1 or less, as their norm makes them.
        value: [B, L, H, V].
        log_decay: g [B, L, H], 0 or less.
        beta: [B, L, H], from 0 to 1.
        seq_idx: integers [B, L], constant within a document and different in the next.
    """
    batch, length, heads, key_dim = key.shape
    rows = min(CHUNK, length)
    chunks = -(-length // rows)
    compute = torch.float64 if value.dtype == torch.float64 else torch.float32

    def chunked(t_BLHx: torch.Tensor) -> torch.Tensor:
        """[N, X, C, ...]. Added tokens have β = 0 and g = 0: they write nothing and leave the state as it is."""
        if added := chunks * rows - length:
            t_BLHx = F.pad(t_BLHx, (0, 0) * (t_BLHx.dim() - 2) + (0, added))
        t_NBHCx = t_BLHx.to(compute).unflatten(1, (chunks, rows)).movedim((1, 3), (0, 2))
        return t_NBHCx.reshape(chunks, batch * heads, rows, *t_BLHx.shape[3:])

    hidden = Hidden.of(sight(seq_idx, chunks, rows, like=log_decay.new_empty(0, dtype=compute)), batch, heads, chunks)
    inputs = (query * key_dim**-0.5, key, value, log_decay, beta)
    out_NXCV = _GatedDeltaRule.apply(*map(chunked, inputs), hidden)
    out_BLHV = out_NXCV.unflatten(1, (batch, heads)).movedim((0, 2), (1, 3)).flatten(1, 2)
    return out_BLHV[:, :length].to(value.dtype)


class Hidden(NamedTuple):
    """What does not see what, as 0 or -inf in the logarithm of a decay (`ssd_parts.Sight`), one for each head."""

    within_NXCC: torch.Tensor
    to_end_NXC: torch.Tensor | float
    from_start_NXC: torch.Tensor | float
    through_NX: torch.Tensor | float

    @classmethod
    def of(cls, seen: Sight, batch: int, heads: int, chunks: int) -> "Hidden":
        def per_head(t_BNx: torch.Tensor | float) -> torch.Tensor | float:
            if isinstance(t_BNx, float):
                return t_BNx
            t_NBHx = t_BNx.transpose(0, 1).unsqueeze(2).expand(chunks, batch, heads, *t_BNx.shape[2:])
            return t_NBHx.flatten(1, 2)

        within, *rest = (seen.within_ZQQ, seen.to_end_BK1Q, seen.from_start_BK1Q, seen.through_BK1)
        rest = [t if isinstance(t, float) else t.squeeze(2) for t in rest]
        alike = len(within) == 1
        return cls(within[None] if alike else per_head(within.unflatten(0, (batch, chunks))), *map(per_head, rest))


class _Decays(NamedTuple):
    """Factors of a chunk: between its tokens (D), from before it to a token, from a token to its end, through it."""

    within_NXCC: torch.Tensor
    from_start_NXC1: torch.Tensor
    to_end_NXC1: torch.Tensor
    through_NX11: torch.Tensor

    @classmethod
    def of(cls, log_decay_NXC: torch.Tensor, hidden: Hidden) -> "_Decays":
        c_NXC = log_decay_NXC.cumsum(-1)
        # Above the diagonal the difference is positive, but finite, so that -inf makes it 0.
        within = (c_NXC.unsqueeze(-1) - c_NXC.unsqueeze(-2)).add_(hidden.within_NXCC).exp_()
        last_NX = c_NXC[..., -1]
        to_end = (last_NX.unsqueeze(-1) - c_NXC + hidden.to_end_NXC).exp()
        from_start = (c_NXC + hidden.from_start_NXC).exp()
        through = (last_NX + hidden.through_NX).exp()
        return cls(within, from_start.unsqueeze(-1), to_end.unsqueeze(-1), through[..., None, None])


class _GatedDeltaRule(torch.autograd.Function):
    """The gradients are written out: autograd's would keep every product of the loop.

    With W = β E, P = D ∘ Q Kᵀ, Y = (1 + N diag(β))⁻ᵀ (β ∂W), from the last chunk to the first:

        ∂W = Pᵀ ∂O + exp(c_C - c) K ∂S'                     ∂V = Y
        ∂S = exp(c_C) ∂S' + (exp(c) Q)ᵀ ∂O - (exp(c) K)ᵀ Y
        ∂P = ∂O Wᵀ          ∂N = -Y Wᵀ below the diagonal   ∂β_j = E_j · (∂W_j - (Nᵀ Y)_j)
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        hidden: Hidden,
    ) -> torch.Tensor:
        decays = _Decays.of(log_decay, hidden)
        inverse_NXCC = _inverse((k @ k.mT).mul_(decays.within_NXCC).mul_(beta.unsqueeze(-2)))
        read_NXCK, written_NXCK = k * decays.from_start_NXC1, k * decays.to_end_NXC1 * beta.unsqueeze(-1)
        chunks, heads, _, key_dim = k.shape
        states_NXKV = v.new_zeros(chunks + 1, heads, key_dim, v.shape[-1])
        error_NXCV = torch.empty_like(v)
        for n in range(chunks):
            wrong_XCV = torch.baddbmm(v[n], read_NXCK[n], states_NXKV[n], alpha=-1)
            torch.bmm(inverse_NXCC[n], wrong_XCV, out=error_NXCV[n])
            kept_XKV = states_NXKV[n] * decays.through_NX11[n]
            torch.baddbmm(kept_XKV, written_NXCK[n].mT, error_NXCV[n], out=states_NXKV[n + 1])
        ctx.save_for_backward(q, k, log_decay, beta, inverse_NXCC, error_NXCV, states_NXKV)
        ctx.hidden = hidden
        scores_NXCC = (q @ k.mT).mul_(decays.within_NXCC).mul_(beta.unsqueeze(-2))
        return (q * decays.from_start_NXC1) @ states_NXKV[:-1] + scores_NXCC @ error_NXCV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_NXCV: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, log_decay, beta, inverse_NXCC, error_NXCV, states_NXKV = ctx.saved_tensors
        decays, chunks = _Decays.of(log_decay, ctx.hidden), len(k)
        before_NXKV, beta_NXC1 = states_NXKV[:-1], beta.unsqueeze(-1)
        dout_NXCV = dout_NXCV.contiguous()
        q_read, k_read, k_written = q * decays.from_start_NXC1, k * decays.from_start_NXC1, k * decays.to_end_NXC1
        w_NXCV = error_NXCV * beta_NXC1
        scores_NXCC = (q @ k.mT).mul_(decays.within_NXCC)

        dw_NXCV = scores_NXCC.mT @ dout_NXCV
        y_NXCV, dk_written = torch.empty_like(dw_NXCV), torch.empty_like(k)
        dthrough_NX = torch.empty_like(log_decay[..., 0])
        dstate_XKV = torch.zeros_like(states_NXKV[0])
        for n in reversed(range(chunks)):
            torch.bmm(w_NXCV[n], dstate_XKV.mT, out=dk_written[n])
            dthrough_NX[n] = (dstate_XKV * before_NXKV[n]).sum((-1, -2))
            dw_NXCV[n] = torch.baddbmm(dw_NXCV[n], k_written[n], dstate_XKV)
            torch.bmm(inverse_NXCC[n].mT, dw_NXCV[n] * beta_NXC1[n], out=y_NXCV[n])
            dstate_XKV = torch.baddbmm(dstate_XKV * decays.through_NX11[n], q_read[n].mT, dout_NXCV[n])
            dstate_XKV = torch.baddbmm(dstate_XKV, k_read[n].mT, y_NXCV[n], alpha=-1)

        n_NXCC = (k @ k.mT).mul_(decays.within_NXCC).tril_(-1)
        dbeta_NXC = (error_NXCV * (dw_NXCV - n_NXCC.mT @ y_NXCV)).sum(-1)
        dscores_NXCC, dn_NXCC = dout_NXCV @ w_NXCV.mT, (y_NXCV @ w_NXCV.mT).neg_()
        pairs_NXCC = scores_NXCC.mul_(dscores_NXCC).add_(n_NXCC.mul_(dn_NXCC))  # gradient of log D
        dscores_NXCC.mul_(decays.within_NXCC)
        dn_NXCC.mul_(decays.within_NXCC).tril_(-1)
        dq_read, dk_read = dout_NXCV @ before_NXKV.mT, (y_NXCV @ before_NXKV.mT).neg_()
        dq = torch.addcmul(dscores_NXCC @ k, dq_read, decays.from_start_NXC1)
        dk = (dscores_NXCC.mT @ q).add_((dn_NXCC + dn_NXCC.mT) @ k)
        dk.addcmul_(dk_read, decays.from_start_NXC1).addcmul_(dk_written, decays.to_end_NXC1)

        to_end_NXC = (dk_written * k_written).sum(-1)
        dc_NXC = pairs_NXCC.sum(-1) - pairs_NXCC.sum(-2) - to_end_NXC
        dc_NXC += (dq_read * q_read).sum(-1) + (dk_read * k_read).sum(-1)
        dc_NXC[..., -1] += to_end_NXC.sum(-1) + dthrough_NX * decays.through_NX11[..., 0, 0]
        return dq, dk, y_NXCV, dc_NXC.flip(-1).cumsum(-1).flip(-1), dbeta_NXC, None


def _inverse(lower_NXCC: torch.Tensor) -> torch.Tensor:
    """(1 + the part below the diagonal)⁻¹."""
    one_CC = torch.eye(lower_NXCC.shape[-1], dtype=lower_NXCC.dtype, device=lower_NXCC.device)
    return torch.linalg.solve_triangular(lower_NXCC, one_CC.expand_as(lower_NXCC), upper=False, unitriangular=True)
