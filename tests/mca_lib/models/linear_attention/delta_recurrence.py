"""The gated delta rule, token by token: the definition, in the dtype of its inputs."""

import torch


def recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """o [B, L, H, V]; arguments as those of `gated_delta_rule`."""
    batch, length, heads, key_dim = key.shape
    state_BHKV = value.new_zeros(batch, heads, key_dim, value.shape[-1])
    outputs = []
    for t in range(length):
        if seq_idx is not None and t:
            same_B = seq_idx[:, t] == seq_idx[:, t - 1]
            state_BHKV = state_BHKV * same_B[:, None, None, None]
        state_BHKV = state_BHKV * log_decay[:, t].exp()[..., None, None]
        held_BHV = (state_BHKV * key[:, t, :, :, None]).sum(-2)
        written_BHV = beta[:, t, :, None] * (value[:, t] - held_BHV)
        state_BHKV = state_BHKV + key[:, t, :, :, None] * written_BHV.unsqueeze(-2)
        outputs.append((state_BHKV * query[:, t, :, :, None]).sum(-2) * key_dim**-0.5)
    return torch.stack(outputs, 1)
