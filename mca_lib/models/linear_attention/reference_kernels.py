"""Megatron-Core's gated delta net without flash-linear-attention.

Call `install_reference_kernels()` before a layer is built. With a GPU and the package nothing is done. On CPU the
reference is used although the package may be installed, since Triton's kernels need a GPU.

Seen with megatron-core 0.19.2: no `GatedDeltaNet` can be constructed without the package. It asks the name `HAVE_FLA`,
and calls three functions that its modules have imported by name. Its own rule in PyTorch (`deterministic_mode`) knows
no packed rows, and asks for the package all the same.
"""

import functools
import importlib.util
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import common, gdn
from torch.utils.checkpoint import checkpoint

from mca_lib.models.hybrid.causal_conv import causal_conv
from mca_lib.models.linear_attention.delta_rule import gated_delta_rule

PACKAGE = "fla"


@functools.cache
def install_reference_kernels() -> None:
    """Make `GatedDeltaNet` work on this machine; calling it again does nothing."""
    if kernels_usable():
        return
    common.HAVE_FLA = True
    common.l2norm = l2norm
    gdn.causal_conv1d = causal_conv1d
    gdn.chunk_gated_delta_rule = chunk_gated_delta_rule


def kernels_usable() -> bool:
    """Whether the package is installed and there is a GPU to run it."""
    return torch.cuda.is_available() and importlib.util.find_spec(PACKAGE) is not None


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x / √(Σ x² + eps) over the last axis, in fp32 and then in the dtype of x: `fla.modules.l2norm.l2norm`."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`fla.modules.convolution.causal_conv1d` from no state: [B, L, E] for x [B, L, E] and weight [E, taps]."""
    # Computed again in the backward pass: else it keeps a copy of its input for every tap.
    out = checkpoint(
        causal_conv,
        x,
        weight,
        bias,
        activation=activation,
        seq_idx=document_numbers(cu_seqlens, x.shape[1]),
        use_reentrant=False,
        preserve_rng_state=False,
    )
    return out, None


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`fla.ops.gated_delta_rule.chunk_gated_delta_rule` from no state, of normalized queries and keys."""
    return gated_delta_rule(q, k, v, g, beta, seq_idx=document_numbers(cu_seqlens, q.shape[1])), None


def document_numbers(cu_seqlens: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """Number of each token's document [1, length], from the cumulative lengths of a packed row."""
    if cu_seqlens is None:
        return None
    tokens = torch.arange(length, device=cu_seqlens.device)
    return torch.bucketize(tokens, cu_seqlens[1:].to(tokens.dtype), right=True)[None]
