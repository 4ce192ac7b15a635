"""Mamba-2's scan in plain PyTorch: what `mamba_ssm` computes in Triton, on any device and with gradients.

State space duality (Dao and Gu 2024, "Transformers are SSMs", arXiv 2405.21060, sections 6 and 7). One head with
state S [P, N], step size Δ, scalar A < 0 and a_t = Δ_t A:

    S_t = exp(a_t) S_{t-1} + Δ_t x_t ⊗ B_t          y_t = S_t C_t

Over tokens j ≤ i this is y_i = Σ_j exp(a_{j+1} + … + a_i) (C_i · B_j) Δ_j x_j: attention without softmax, whose causal
mask decays. Tokens are cut into chunks. Within a chunk that sum is a product of matrices; between chunks only states
travel:

    y = (L ∘ C Bᵀ) (Δ x)  +  exp(a_1 + … + a_i) C S_before          L_ij = exp(a_{j+1} + … + a_i), 0 for j > i

So time and memory are linear in the number of tokens. Documents packed into one row (`seq_idx`) do not see each
other: their entries in L are 0, and a state enters a chunk for the tokens of its own document alone.

B: batch, L: tokens, H: heads, P: size of a head, G: groups of heads that share B and C, R: heads of a group,
N: size of a state, K: chunks, Q: tokens of a chunk.
"""

import math

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from mca_lib.models.hybrid.causal_conv import causal_conv
from mca_lib.models.hybrid.ssd_parts import decayed_attention, sight, states_before_chunks

NO_LIMIT = (0.0, math.inf)


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y [B, L, H, P] in the dtype of x; with `return_final_states` also the last token's state [B, H, P, N].

    The signature is that of `mamba_ssm` 2.2. Everything is computed in fp32, in fp64 where x is.

    Args:
        x: [B, L, H, P].
        dt: step sizes [B, L, H], before `dt_bias`, softplus and `dt_limit`, in this order.
        A: [H], negative.
        B, C: [B, L, G, N]; group g serves heads g·H/G to (g + 1)·H/G - 1.
        chunk_size: no longer chunks than this; what is used follows from the sizes (`chunk_length`).
        D: the skip connection, [H] or [H, P].
        z: a gate [B, L, H, P]: the result is y · silu(z).
        dt_bias: [H].
        initial_states: [B, H, P, N], continued by the first token's document; zero by default.
        seq_idx: integers [B, L], constant within a document and different in the next.
        state_dtype: how Triton's kernels keep the states of chunks; here these are never rounded.
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    dt_BLH = step_sizes(dt.to(compute), dt_bias, dt_softplus, dt_limit)
    x_BLHP = x.to(compute)
    y_BLHP, final_BHPN = _scan(
        x_BLHP, dt_BLH, A.to(compute), B.to(compute), C.to(compute), chunk_size, seq_idx, initial_states
    )
    if D is not None:
        y_BLHP = torch.addcmul(y_BLHP, x_BLHP, _per_head(D).to(compute))
    if z is not None:
        y_BLHP = y_BLHP * F.silu(z.to(compute))
    y_BLHP = y_BLHP.to(x.dtype)
    return (y_BLHP, final_BHPN) if return_final_states else y_BLHP


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = False,
    state_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Convolution, scan and gate of a Mamba-2 layer, from the output of its input projection.

    The signature is that of `mamba_ssm` 2.2 without the norm and the output projection that can be fused there:
    Megatron-Core's mixer keeps both outside, so `norm_before_gate` says nothing here.

    Args:
        zxbcdt: [B, L, 2·H·P + 2·G·N + H]: gate, x, B, C and step sizes side by side.
        conv1d_weight: [H·P + 2·G·N, taps], depthwise over x, B and C.
        dt_bias, A: [H].
        D: [H], which needs `headdim`, or [H, P].

    Returns:
        y [B, L, H·P]; with `return_final_states` also the last state [B, H, P, N].
    """
    heads, head_dim = D.shape if D.dim() == 2 else (D.shape[0], headdim)
    inner = heads * head_dim
    conv_size = conv1d_weight.shape[0]
    z_BLI, xbc_BLE, dt_BLH = zxbcdt.split([inner, conv_size, heads], -1)
    # Computed again in the backward pass, as by `mamba_ssm`: else it is two fifths of what the scan's graph keeps.
    xbc_BLE = checkpoint(
        causal_conv,
        xbc_BLE,
        conv1d_weight,
        conv1d_bias,
        activation=activation,
        seq_idx=seq_idx,
        use_reentrant=False,
        preserve_rng_state=False,
    )
    x_BLI, b_BLS, c_BLS = xbc_BLE.split([inner, (conv_size - inner) // 2, (conv_size - inner) // 2], -1)
    found = mamba_chunk_scan_combined(
        x_BLI.unflatten(-1, (heads, head_dim)),
        dt_BLH,
        A,
        b_BLS.unflatten(-1, (ngroups, -1)),
        c_BLS.unflatten(-1, (ngroups, -1)),
        chunk_size,
        D=D,
        z=z_BLI.unflatten(-1, (heads, head_dim)),
        dt_bias=dt_bias,
        initial_states=initial_states,
        seq_idx=seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=return_final_states,
    )
    return (found[0].flatten(-2), found[1]) if return_final_states else found.flatten(-2)


def step_sizes(
    dt_BLH: torch.Tensor,
    dt_bias: torch.Tensor | None = None,
    softplus: bool = True,
    limit: tuple[float, float] = NO_LIMIT,
) -> torch.Tensor:
    """Δ from what the input projection gives: plus the bias, softplus, clamped."""
    if dt_bias is not None:
        dt_BLH = dt_BLH + dt_bias.to(dt_BLH.dtype)
    if softplus:
        dt_BLH = F.softplus(dt_BLH)
    return dt_BLH if tuple(limit) == NO_LIMIT else dt_BLH.clamp(*limit)


def chunk_length(head_dim: int, state_size: int, longest: int) -> int:
    """Tokens of a chunk: a power of two near √(P·N), 32 to 128, and no more than `longest`.

    A token of a head costs Q entries of L and P·N/Q of its chunk's state; the two are equal there.
    """
    balanced = 2 ** round(math.log2(head_dim * state_size) / 2)
    return min(max(32, min(balanced, 128)), longest)


def _scan(
    x_BLHP: torch.Tensor,
    dt_BLH: torch.Tensor,
    A_H: torch.Tensor,
    B_BLGN: torch.Tensor,
    C_BLGN: torch.Tensor,
    chunk_size: int,
    seq_idx_BL: torch.Tensor | None,
    initial_BHPN: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y without D and gate, and the state after the last token."""
    batch, length, heads, head_dim = x_BLHP.shape
    groups, state_size = B_BLGN.shape[2:]
    rows = chunk_length(head_dim, state_size, min(chunk_size, length))
    chunks = -(-length // rows)
    # Added tokens have x = 0 and Δ = 0: they write nothing and leave the state as it is.
    x_BLHP, dt_BLH, B_BLGN, C_BLGN = (_lengthen(t, chunks * rows) for t in (x_BLHP, dt_BLH, B_BLGN, C_BLGN))
    x_ZQGRP = x_BLHP.reshape(batch * chunks, rows, groups, -1, head_dim)
    dt_ZQGR = dt_BLH.reshape(batch * chunks, rows, groups, -1)
    B_ZGQN, C_ZGQN = (t.reshape(batch * chunks, rows, groups, -1).transpose(1, 2) for t in (B_BLGN, C_BLGN))
    # logarithm of the decay from before the chunk up to and including token q
    decay_ZGRQ = (dt_ZQGR * A_H.view(groups, -1)).permute(0, 2, 3, 1).cumsum(-1)
    decay_BKHQ = decay_ZGRQ.reshape(batch, chunks, heads, rows)
    seen = sight(seq_idx_BL, chunks, rows, like=x_BLHP)

    y_ZQGRP = decayed_attention(C_ZGQN @ B_ZGQN.mT, decay_ZGRQ, x_ZQGRP, dt_ZQGR, seen.within_ZQQ)

    to_end_BKHQ = (decay_BKHQ[..., -1:] - decay_BKHQ + seen.to_end_BK1Q).exp()
    weight_ZQGR = dt_ZQGR * to_end_BKHQ.transpose(-1, -2).reshape(dt_ZQGR.shape)
    written_ZGXN = (x_ZQGRP * weight_ZQGR[..., None]).flatten(-2).permute(0, 2, 3, 1) @ B_ZGQN
    through_BKH = (decay_BKHQ[..., -1] + seen.through_BK1).exp()
    if initial_BHPN is None:
        initial_BHPN = x_BLHP.new_zeros(batch, heads, head_dim, state_size)
    before_BKHPN, final_BHPN = states_before_chunks(
        written_ZGXN.view(batch, chunks, heads, head_dim, state_size), through_BKH, initial_BHPN.to(x_BLHP.dtype)
    )

    read_ZGQX = C_ZGQN @ before_BKHPN.reshape(batch * chunks, groups, -1, state_size).mT
    from_start_BKHQ = (decay_BKHQ + seen.from_start_BK1Q).exp()
    from_start_ZQGR = from_start_BKHQ.transpose(-1, -2).reshape(dt_ZQGR.shape)
    y_ZQGRP = torch.addcmul(y_ZQGRP, read_ZGQX.transpose(1, 2).view(x_ZQGRP.shape), from_start_ZQGR[..., None])
    return y_ZQGRP.view(batch, chunks * rows, heads, head_dim)[:, :length], final_BHPN


def _lengthen(t_BLX: torch.Tensor, length: int) -> torch.Tensor:
    """With zeros as further tokens; X is any number of dimensions."""
    added = length - t_BLX.shape[1]
    return F.pad(t_BLX, (0, 0) * (t_BLX.dim() - 2) + (0, added)) if added else t_BLX


def _per_head(D: torch.Tensor) -> torch.Tensor:
    """[H] as [H, 1], which [..., H, P] multiplies with; [H, P] as it is."""
    return D[:, None] if D.dim() == 1 else D
