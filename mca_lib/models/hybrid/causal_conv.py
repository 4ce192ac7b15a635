"""The depthwise causal convolution of a Mamba layer, in plain PyTorch.

y_t = bias + Σ_s weight_s · x_{t-s} for each channel, s = 0 … taps - 1, where x before the first token of a document
is 0. `weight[:, -1]` belongs to the token itself, as in `torch.nn.Conv1d`.

B: batch, L: tokens, E: channels, W: taps.
"""

import torch
import torch.nn.functional as F


def causal_conv(
    x_BLE: torch.Tensor,
    weight_EW: torch.Tensor,
    bias_E: torch.Tensor | None = None,
    *,
    activation: str | None = "silu",
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, L, E] in the dtype of x; `seq_idx` [B, L] differs between neighbouring documents of a row.

    A sum of shifted copies, in the layout of the input projection: no transposes, and documents are one mask per tap.
    """
    length, taps = x_BLE.shape[1], weight_EW.shape[1]
    compute = torch.float64 if x_BLE.dtype == torch.float64 else torch.float32
    padded = F.pad(x_BLE.to(compute), (0, 0, taps - 1, 0))
    weight = weight_EW.to(compute)
    y = weight.new_zeros(()) if bias_E is None else bias_E.to(compute)
    for tap in range(taps):
        earlier = padded[:, tap : tap + length]
        shift = taps - 1 - tap
        if seq_idx is not None and shift:
            same = seq_idx[:, shift:] == seq_idx[:, :-shift]
            earlier = earlier * F.pad(same, (min(shift, length), 0)).unsqueeze(-1)
        y = torch.addcmul(y, earlier, weight[:, tap])
    return _activate(y, activation).to(x_BLE.dtype)


def _activate(y: torch.Tensor, activation: str | None) -> torch.Tensor:
    if activation in ("silu", "swish"):
        return F.silu(y)
    if activation is None:
        return y
    raise ValueError(f"activation of a causal convolution is silu or none, not {activation!r}")
