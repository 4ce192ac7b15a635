"""RMSNorm with a gate, in groups of channels: `mamba_ssm.ops.triton.layernorm_gated.RMSNorm` in plain PyTorch."""

import torch
import torch.nn.functional as F


class RMSNormGated(torch.nn.Module):
    """weight · x / √(mean x² + eps) over each group of channels, in fp32 (fp64 where x is), in the dtype of x.

    The gate silu(z) multiplies the result (`norm_before_gate`) or x before it; Megatron-Core's mixer has the second.

    Args:
        hidden_size: channels of this rank.
        group_size: channels that are normalized together; all of them by default.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps, self.norm_before_gate = eps, norm_before_gate
        self.group_size = group_size or hidden_size

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """x and z [..., hidden_size]."""
        compute = torch.float64 if x.dtype == torch.float64 else torch.float32
        gate = None if z is None else F.silu(z.to(compute))
        y = x.to(compute)
        if gate is not None and not self.norm_before_gate:
            y = y * gate
        groups = y.unflatten(-1, (-1, self.group_size))
        y = F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight.to(compute)
        if gate is not None and self.norm_before_gate:
            y = y * gate
        return y.to(x.dtype)
