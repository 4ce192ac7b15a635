"""The scan of Mamba-2 as its definition says, token by token in float64: the reference of the kernels' tests."""

import torch
import torch.nn.functional as F


def recurrence(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and the last state; arguments as of `mamba_chunk_scan_combined`."""
    batch, length, heads, head_dim = x.shape
    B, C = (t.repeat_interleave(heads // t.shape[2], 2) for t in (B, C))
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    state = x.new_zeros(batch, heads, head_dim, B.shape[-1]) if initial_states is None else initial_states
    y = []
    for t in range(length):
        if seq_idx is not None and t:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        write = (dt[:, t, :, None] * x[:, t]).unsqueeze(-1) * B[:, t].unsqueeze(-2)
        state = (dt[:, t] * A).exp()[..., None, None] * state + write
        y.append((state * C[:, t].unsqueeze(-2)).sum(-1))
    result = torch.stack(y, 1)
    if D is not None:
        result = result + x * (D[:, None] if D.dim() == 1 else D)
    return (result if z is None else result * F.silu(z)), state
