"""The causal convolution against torch's in float64, packed documents, and single tokens."""

import pytest
import torch
import torch.nn.functional as F

from mca_lib.models.hybrid.causal_conv import causal_conv

BATCH, LENGTH, CHANNELS, TAPS = 2, 9, 5, 4


def inputs(length: int = LENGTH, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(BATCH, length, CHANNELS), (CHANNELS, TAPS), (CHANNELS,)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def torchs(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    padded = F.pad(x.transpose(1, 2), (TAPS - 1, 0))
    return F.conv1d(padded, weight[:, None], bias, groups=CHANNELS).transpose(1, 2)


@pytest.mark.parametrize("length", [LENGTH, 2])
def test_values_and_gradients_are_those_of_conv1d(length: int) -> None:
    tensors = [tensor.requires_grad_() for tensor in inputs(length)]
    found, expected = causal_conv(*tensors), F.silu(torchs(*tensors))
    torch.testing.assert_close(found, expected)
    factor = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad((found * factor).sum(), tensors),
        torch.autograd.grad((expected * factor).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_without_bias_and_activation() -> None:
    x, weight, _ = inputs()
    torch.testing.assert_close(causal_conv(x, weight, activation=None), torchs(x, weight, None))


def test_another_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="'gelu'"):
        causal_conv(*inputs(), activation="gelu")


# Documents of one token, of fewer tokens than taps, and of more.
@pytest.mark.parametrize("length", [LENGTH, 2])
def test_packed_documents_are_separate_sequences(length: int) -> None:
    x, weight, bias = inputs(length)
    seq_idx = torch.tensor([[0, 1, 2, 2, 2, 3, 3, 3, 3], [0, 0, 0, 0, 0, 0, 1, 1, 1]])[:, :length]
    packed = causal_conv(x, weight, bias, seq_idx=seq_idx)
    for row in range(BATCH):
        for document in seq_idx[row].unique():
            mine = seq_idx[row] == document
            alone = causal_conv(x[row : row + 1, mine], weight, bias)
            torch.testing.assert_close(packed[row : row + 1, mine], alone)


def test_bf16_rounds_only_what_goes_out() -> None:
    x, weight, bias = inputs(dtype=torch.bfloat16)
    exact = causal_conv(x.float(), weight.float(), bias.float())
    assert torch.equal(causal_conv(x, weight, bias), exact.bfloat16())
