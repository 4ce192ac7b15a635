"""The RMSNorm of the local layer against transformers'."""

import pytest
import torch

pytest.importorskip("megatron.core")


def norm_like_megatron(dtype: torch.dtype, zero_centered: bool) -> torch.nn.Module:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mca_lib.models.norm import RMSNorm

    config = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        layernorm_zero_centered_gamma=zero_centered,
    )
    return RMSNorm(config, 64, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_zero_centered_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

    ours, theirs = norm_like_megatron(dtype, zero_centered=True), Qwen3NextRMSNorm(64, eps=1e-6).to(dtype)
    assert torch.equal(ours.weight, theirs.weight)  # both start at 0
    torch.manual_seed(0)
    x, weight = 3 * torch.randn(5, 64), 0.02 * torch.randn(64)
    results = []
    for norm in (ours, theirs):
        norm.weight.data.copy_(weight)
        own = x.to(dtype).requires_grad_()
        out = norm(own)
        assert out.dtype == dtype
        out.float().square().sum().backward()
        results.append((out.float(), own.grad.float(), norm.weight.grad.float()))
    # One rounding of the dtype, of values up to about 10.
    scale = torch.finfo(dtype).eps
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=4 * scale, atol=20 * scale)


def test_a_weight_below_the_roundings_of_one_counts_in_bf16() -> None:
    """1 + 0.001 is 1 in bf16; the product of a large input must still show it."""
    norm = norm_like_megatron(torch.bfloat16, zero_centered=True)
    x = torch.linspace(-2, 2, 64).to(torch.bfloat16)[None]
    plain = norm(x)
    torch.nn.init.constant_(norm.weight, 0.001)
    assert not torch.equal(norm(x), plain)


def test_a_plain_norm_starts_at_one() -> None:
    assert torch.equal(norm_like_megatron(torch.float32, zero_centered=False).weight, torch.ones(64))
