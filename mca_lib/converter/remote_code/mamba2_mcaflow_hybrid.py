"""A Mamba-2 layer in plain PyTorch (Dao and Gu 2024, "Transformers are SSMs", https://arxiv.org/abs/2405.21060).

One head with state S [P, N], step dt, scalar A < 0 and a_t = dt_t A:

    S_t = exp(a_t) S_(t-1) + dt_t x_t ⊗ B_t          y_t = S_t C_t + D x_t

Many tokens are computed in chunks, as products of matrices; one token by the recurrence itself. Both begin with the
state that earlier tokens have left.

B batch, S tokens, H heads, P channels of a head, G groups of heads that share B and C, R heads of a group, N size of
the state, K chunks, Q tokens of a chunk, C channels of the convolution.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .configuration_mcaflow_hybrid import McaflowHybridConfig

MambaState = tuple[torch.Tensor, torch.Tensor]
"""What a layer keeps of the tokens before: the convolution's last inputs [B, kernel - 1, C], and S [B, H, P, N]."""

CHUNK = 64
"""Tokens of a chunk: on a CPU faster than more or fewer."""


class GatedRMSNorm(nn.Module):
    """RMSNorm of y · silu(z) over each group of channels on its own."""

    def __init__(self, size: int, groups: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups, self.epsilon = groups, epsilon

    def forward(self, y_BSI: torch.Tensor, z_BSI: torch.Tensor) -> torch.Tensor:
        gated_BSI = y_BSI.float() * F.silu(z_BSI.float())
        grouped = gated_BSI.unflatten(-1, (self.groups, -1))
        grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.epsilon)
        return (self.weight.float() * grouped.flatten(-2)).to(z_BSI.dtype)


class Mamba2(nn.Module):
    """Projection, short convolution, state space model, gated norm, projection."""

    def __init__(self, config: McaflowHybridConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.mamba_num_heads, config.mamba_head_dim
        self.groups, self.state_size = config.mamba_num_groups, config.mamba_state_size
        self.chunk = min(CHUNK, config.mamba_chunk_size)
        self.inner = self.heads * self.head_dim
        self.convolved = self.inner + 2 * self.groups * self.state_size
        self.kernel = config.mamba_conv_kernel
        self.in_proj = nn.Linear(config.hidden_size, self.inner + self.convolved + self.heads, bias=False)
        self.conv1d = nn.Conv1d(self.convolved, self.convolved, self.kernel, groups=self.convolved)
        self.dt_bias = nn.Parameter(torch.zeros(self.heads))
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.D = nn.Parameter(torch.ones(self.heads))
        self.norm = GatedRMSNorm(self.inner, self.groups, config.mamba_norm_eps)
        self.out_proj = nn.Linear(self.inner, config.hidden_size, bias=False)

    def forward(
        self, hidden_BSE: torch.Tensor, state: MambaState | None = None, mask_BS: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, MambaState]:
        """Output [B, S, E] and the state after the last token. Where the mask is 0 there is no token: nothing of it
        enters the convolution or the state."""
        z_BSI, inputs_BSC, dt_BSH = self.in_proj(hidden_BSE).split([self.inner, self.convolved, self.heads], -1)
        dt_BSH = F.softplus(dt_BSH.float() + self.dt_bias.float())
        if mask_BS is not None:
            inputs_BSC = inputs_BSC * mask_BS[..., None]
            dt_BSH = dt_BSH * mask_BS[..., None]
        before_BTC = (
            inputs_BSC.new_zeros(len(inputs_BSC), self.kernel - 1, self.convolved) if state is None else state[0]
        )
        inputs_BTC = torch.cat([before_BTC, inputs_BSC], 1)
        x_BSI, b_BSX, c_BSX = F.silu(self.conv1d(inputs_BTC.transpose(1, 2)).transpose(1, 2)).split(
            [self.inner, self.groups * self.state_size, self.groups * self.state_size], -1
        )
        x_BSGRP = x_BSI.float().unflatten(-1, (self.groups, self.heads // self.groups, self.head_dim))
        b_BSGN, c_BSGN = (t.float().unflatten(-1, (self.groups, self.state_size)) for t in (b_BSX, c_BSX))
        dt_BSGR = dt_BSH.unflatten(-1, (self.groups, -1))
        a_BSGR = dt_BSGR * -torch.exp(self.A_log.float()).view(self.groups, -1)
        start_BGRPN = x_BSGRP.new_zeros(*x_BSGRP[:, 0].shape, self.state_size) if state is None else state[1]
        scan = _step if hidden_BSE.shape[1] == 1 else self._chunks
        y_BSGRP, end_BGRPN = scan(x_BSGRP * dt_BSGR[..., None], a_BSGR, b_BSGN, c_BSGN, start_BGRPN)
        y_BSGRP = y_BSGRP + x_BSGRP * self.D.float().view(self.groups, -1, 1)
        y_BSI = y_BSGRP.flatten(2).to(hidden_BSE.dtype)
        return self.out_proj(self.norm(y_BSI, z_BSI)), (inputs_BTC[:, inputs_BSC.shape[1] :], end_BGRPN)

    def _chunks(
        self,
        x_BSGRP: torch.Tensor,
        a_BSGR: torch.Tensor,
        b_BSGN: torch.Tensor,
        c_BSGN: torch.Tensor,
        state_BGRPN: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """y_i = Σ_(j ≤ i) exp(a_(j+1) + … + a_i) (C_i · B_j) x_j within a chunk, and C_i · S decayed from before it."""
        length = x_BSGRP.shape[1]
        size = min(self.chunk, length)
        # Added tokens have x = 0 and a = 0: they leave the state as it is.
        padding = -length % size
        x, a, b, c = (
            F.pad(t, (0, 0) * (t.dim() - 2) + (0, padding)).unflatten(1, (-1, size))
            for t in (x_BSGRP, a_BSGR, b_BSGN, c_BSGN)
        )
        sum_BKQGR = a.cumsum(2)
        decay_BKQJGR = sum_BKQGR[:, :, :, None] - sum_BKQGR[:, :, None]
        later_QJ = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
        decay_BKQJGR = decay_BKQJGR.masked_fill(later_QJ[:, :, None, None], -torch.inf).exp()
        scores_BKQJG = torch.einsum("bkqgn,bkjgn->bkqjg", c, b)
        y_BKQGRP = torch.einsum("bkqjgr,bkjgrp->bkqgrp", scores_BKQJG[..., None] * decay_BKQJGR, x)
        total_BKGR = sum_BKQGR[:, :, -1]
        left = (total_BKGR[:, :, None] - sum_BKQGR).exp()
        added_BKGRPN = torch.einsum("bkjgrp,bkjgn->bkgrpn", x * left[..., None], b)
        before = []
        for k in range(x.shape[1]):
            before.append(state_BGRPN)
            state_BGRPN = state_BGRPN * total_BKGR[:, k].exp()[..., None, None] + added_BKGRPN[:, k]
        earlier = torch.einsum("bkqgn,bkgrpn->bkqgrp", c, torch.stack(before, 1))
        y_BKQGRP = y_BKQGRP + earlier * sum_BKQGR.exp()[..., None]
        return y_BKQGRP.flatten(1, 2)[:, :length], state_BGRPN


def _step(
    x_B1GRP: torch.Tensor,
    a_B1GR: torch.Tensor,
    b_B1GN: torch.Tensor,
    c_B1GN: torch.Tensor,
    state_BGRPN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence, for one token."""
    x_BGRP, a_BGR, b_BGN, c_BGN = (t[:, 0] for t in (x_B1GRP, a_B1GR, b_B1GN, c_B1GN))
    state_BGRPN = state_BGRPN * a_BGR.exp()[..., None, None] + x_BGRP[..., None] * b_BGN[:, :, None, None]
    return torch.einsum("bgrpn,bgn->bgrp", state_BGRPN, c_BGN)[:, None], state_BGRPN
