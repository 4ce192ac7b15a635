"""The chunked scan against the recurrence in float64: values, gradients, packed documents, states."""

from functools import partial
from typing import Any

import pytest
import torch

from mca_lib.models.hybrid import ssd_parts
from mca_lib.models.hybrid.causal_conv import causal_conv
from mca_lib.models.hybrid.ssd import (
    chunk_length,
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
)
from tests.mca_lib.models.hybrid.recurrence import recurrence

BATCH, HEADS, HEAD_DIM, STATE = 2, 4, 8, 16
# Chunks of 32 tokens; documents begin within a chunk, at its first token, and twice in one.
STARTS = torch.tensor([[0, 5, 32, 70, 71, 72], [0, 33, 34, 40, 64, 99]])

# What differs from one group, 100 tokens, D of one number per head, softplus and a bias.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two groups, less than a chunk": {"groups": 2, "length": 20},
    "one token": {"length": 1, "initial": True},
    "whole chunks": {"length": 96},
    "D per channel, gate": {"D": (HEADS, HEAD_DIM), "gate": True},
    "limited steps, no D": {"D": None, "dt_limit": (0.2, 1.0)},
    "documents": {"packed": True},
    "documents, two groups, a state before": {"packed": True, "groups": 2, "initial": True},
    "a state before": {"initial": True},
}


def inputs(
    groups: int = 1,
    length: int = 100,
    D: tuple[int, ...] | None = (HEADS,),
    gate: bool = False,
    packed: bool = False,
    initial: bool = False,
    **options: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors that have gradients, and the other arguments. Steps of softplus(0) and A down to -4: strong decay."""
    generator = torch.Generator().manual_seed(length + groups)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {
        "x": normal(BATCH, length, HEADS, HEAD_DIM),
        "dt": normal(BATCH, length, HEADS),
        "A": -torch.linspace(0.1, 4, HEADS, dtype=torch.float64),
        "B": normal(BATCH, length, groups, STATE),
        "C": normal(BATCH, length, groups, STATE),
        "dt_bias": normal(HEADS),
    }
    if D is not None:
        tensors["D"] = normal(*D)
    if gate:
        tensors["z"] = normal(BATCH, length, HEADS, HEAD_DIM)
    if initial:
        tensors["initial_states"] = normal(BATCH, HEADS, HEAD_DIM, STATE)
    if packed:
        options["seq_idx"] = (torch.arange(length)[None, :, None] >= STARTS[:, None]).sum(-1)
    return tensors, {"dt_softplus": True, **options}


def with_gradients(scan: Any, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """y, the last state, and the gradients of a random linear function of both."""
    tensors = {name: tensor.to(dtype).requires_grad_() for name, tensor in tensors.items()}
    y, state = scan(**tensors)
    generator = torch.Generator().manual_seed(1)
    loss = sum((out * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum() for out in (y, state))
    gradients = torch.autograd.grad(loss, list(tensors.values()))
    found = {f"∂{name}": gradient for name, gradient in zip(tensors, gradients, strict=True)}
    return {"y": y.detach(), "state": state.detach(), **found}


# float64: rounding alone. fp32: a sum of up to 128 terms, whose decays are differences of sums of 32 logarithms.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_recurrence(case: str, dtype: torch.dtype, tolerance: float) -> None:
    tensors, options = inputs(**CASES[case])
    expected = with_gradients(lambda **t: recurrence(**t, **options), tensors, torch.float64)
    found = with_gradients(
        lambda **t: mamba_chunk_scan_combined(**t, chunk_size=256, return_final_states=True, **options), tensors, dtype
    )
    for name, value in expected.items():
        assert found[name].dtype == dtype
        error = (found[name] - value).abs().max() / value.abs().max()
        assert error < tolerance, name


@pytest.mark.parametrize("cut", ["chunks of 8 tokens", "one chunk at a time"])
def test_how_the_sum_is_cut_changes_nothing(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, options = inputs(packed=True, groups=2)

    def scan(chunk_size: int = 256, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return mamba_chunk_scan_combined(**given, chunk_size=chunk_size, return_final_states=True, **options)

    expected = with_gradients(scan, tensors, torch.float64)
    monkeypatch.setitem(ssd_parts.BLOCK_ENTRIES, "cpu", 1 if cut == "one chunk at a time" else 2**30)
    found = with_gradients(partial(scan, 8) if cut == "chunks of 8 tokens" else scan, tensors, torch.float64)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-11)


def test_packed_documents_are_separate_sequences() -> None:
    tensors, options = inputs(packed=True)
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    whole = mamba_chunk_scan_combined(**tensors, chunk_size=256, **options)
    for row, starts in enumerate(STARTS.tolist()):
        for start, stop in zip(starts, [*starts[1:], 100], strict=True):
            alone = mamba_chunk_scan_combined(
                **cut_out(tensors, slice(start, stop), slice(row, row + 1)), chunk_size=256, dt_softplus=True
            )
            # Chunks begin elsewhere, so sums round otherwise; |y| is up to 60.
            torch.testing.assert_close(whole[row : row + 1, start:stop], alone, rtol=1e-5, atol=2e-5)


def cut_out(tensors: dict[str, torch.Tensor], tokens: slice, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
    return {name: t[rows, tokens] if name in ("x", "dt", "B", "C", "z") else t for name, t in tensors.items()}


@pytest.mark.parametrize("groups", [1, 2])
def test_a_sequence_goes_on_from_its_state_in_parts(groups: int) -> None:
    tensors, options = inputs(groups=groups)
    whole, last = mamba_chunk_scan_combined(**tensors, chunk_size=256, return_final_states=True, **options)
    first, state = mamba_chunk_scan_combined(
        **cut_out(tensors, slice(0, 45)), chunk_size=256, return_final_states=True, **options
    )
    second, end = mamba_chunk_scan_combined(
        **cut_out(tensors, slice(45, 100)), chunk_size=256, initial_states=state, return_final_states=True, **options
    )
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=0, atol=1e-11)
    torch.testing.assert_close(end, last, rtol=0, atol=1e-11)


def test_a_decay_that_leaves_nothing_has_finite_gradients() -> None:
    tensors, options = inputs(packed=True)
    tensors["A"], tensors["dt"] = torch.full((HEADS,), -1e4), tensors["dt"] * 1e3
    found = with_gradients(
        lambda **t: mamba_chunk_scan_combined(**t, chunk_size=256, return_final_states=True, **options),
        tensors,
        torch.float32,
    )
    assert all(value.isfinite().all() for value in found.values())


def test_bf16_rounds_what_comes_in_and_what_goes_out() -> None:
    tensors, options = inputs(gate=True)
    rounded = {name: tensor.bfloat16() if name in "x dt B C z" else tensor.float() for name, tensor in tensors.items()}
    found = mamba_chunk_scan_combined(**rounded, chunk_size=256, **options)
    exact = mamba_chunk_scan_combined(**{n: t.float() for n, t in rounded.items()}, chunk_size=256, **options)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.bfloat16())


@pytest.mark.parametrize("D", [(HEADS,), (HEADS, HEAD_DIM)])
def test_the_whole_layer_is_convolution_scan_and_gate(D: tuple[int, ...]) -> None:
    tensors, options = inputs(groups=2, gate=True, packed=True, D=D)
    inner = HEADS * HEAD_DIM
    weight, bias = torch.randn(inner + 4 * STATE, 4).double(), torch.randn(inner + 4 * STATE).double()
    xbc = torch.cat([tensors[name].flatten(2) for name in "xBC"], -1)
    found, state = mamba_split_conv1d_scan_combined(
        torch.cat([tensors["z"].flatten(2), xbc, tensors["dt"]], -1),
        weight, bias, tensors["dt_bias"], tensors["A"], tensors["D"], 256,
        seq_idx=options["seq_idx"], headdim=HEAD_DIM, ngroups=2, return_final_states=True,
    )  # fmt: skip
    x, B, C = causal_conv(xbc, weight, bias, seq_idx=options["seq_idx"]).split([inner, 2 * STATE, 2 * STATE], -1)
    tensors["x"], tensors["B"], tensors["C"] = (
        t.unflatten(-1, (parts, -1)) for t, parts in ((x, HEADS), (B, 2), (C, 2))
    )
    expected, expected_state = recurrence(**tensors, **options)
    torch.testing.assert_close(found, expected.flatten(2), rtol=0, atol=1e-11)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=1e-11)


def test_the_backward_pass_keeps_few_copies_of_its_inputs() -> None:
    """In fp32 as much as 8 times the gate, x, B and C in bf16, of a head of 64 and a state of 128; 13 with the
    convolution's own graph."""
    heads, length, state = 18, 512, 128
    inner, conv = heads * 64, heads * 64 + 2 * state
    projected = torch.randn(1, length, inner + conv + heads, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = torch.randn(conv, 4).requires_grad_(), torch.randn(conv).requires_grad_()
    ones = torch.ones(heads, requires_grad=True)
    seq_idx = torch.arange(length)[None] // 200
    inputs, kept = {t.untyped_storage().data_ptr() for t in (projected, weight, bias, ones)}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes(), tensor  # which holds the address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mamba_split_conv1d_scan_combined(
            projected, weight, bias, ones, -ones, ones, 64, seq_idx=seq_idx, headdim=64, ngroups=1
        )
    held = sum(size for address, (size, _) in kept.items() if address not in inputs)
    assert held <= 8 * projected.numel() * 2  # measured: 7.8


@pytest.mark.parametrize(
    ("head_dim", "state_size", "longest", "tokens"),
    [(64, 128, 256, 64), (64, 256, 256, 128), (16, 16, 256, 32), (128, 256, 256, 128), (64, 128, 20, 20)],
)
def test_chunks_fit_the_sizes_of_head_and_state(head_dim: int, state_size: int, longest: int, tokens: int) -> None:
    assert chunk_length(head_dim, state_size, longest) == tokens
