"""The Mamba-2 scan, forward and backward, against a loop over tokens and against transformers' torch path.

One row of tokens in fp32, one thread, the sizes of a Mamba layer of a 576-wide hybrid. The competitors take turns, each
in a fresh process; the fastest of the repeats counts, and peak memory is what the process grew by. transformers is
measured with its default chunk of 256 tokens and with the 64 that are used here.
"""

import resource
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

from mca_lib.ranks import RankPool

HEADS, HEAD_DIM, STATE, GROUPS = 18, 64, 128, 1
ROUNDS, REPEATS = 3, 3
# Tokens -> at least so many times as fast as the loop, as transformers with its own chunk, as transformers with ours.
LEAST = {512: (3.0, 2.0, 1.0), 2048: (5.0, 2.5, 1.2)}


def ours() -> Callable[..., torch.Tensor]:
    from mca_lib.models.hybrid.ssd import mamba_chunk_scan_combined

    return lambda *inputs: mamba_chunk_scan_combined(*inputs, 256, dt_softplus=True)


def loop() -> Callable[..., torch.Tensor]:
    from tests.mca_lib.models.hybrid.recurrence import recurrence

    return lambda *inputs: recurrence(*inputs, dt_softplus=True)[0]


def transformers(chunk: int = 256) -> Callable[..., torch.Tensor]:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    return lambda *inputs: mamba2_chunk_scan(*inputs, chunk, dt_softplus=True)


def transformers_64() -> Callable[..., torch.Tensor]:
    return transformers(64)


COMPETITORS = {
    "mcaflow": ours,
    "loop over tokens": loop,
    "transformers": transformers,
    "transformers, chunk 64": transformers_64,
}


def measure(name: str, length: int) -> tuple[float, int]:
    """Seconds of a forward and backward pass, and bytes that it needed."""
    scan = COMPETITORS[name]()
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, length, HEADS, HEAD_DIM), (1, length, HEADS), (HEADS,), *[(1, length, GROUPS, STATE)] * 2]
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    inputs[2] = -inputs[2].abs()
    for tensor in inputs:
        tensor.requires_grad_()
    scan(*[tensor[:, :64] if tensor.dim() > 1 else tensor for tensor in inputs]).sum().backward()
    before = peak()
    seconds = timed(lambda: scan(*inputs).sum().backward())
    return seconds, peak() - before


def timed(work: Callable[[], None]) -> float:
    """Seconds of the fastest repeat."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("length", LEAST)
def test_the_scan_is_faster_than_a_loop_and_than_transformers(length: int) -> None:
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in COMPETITORS}
    with RankPool() as pool:
        for _ in range(ROUNDS):
            for name, results in found.items():
                results += pool.run_ranks(1, measure, name, length, timeout=600.0)
    seconds = {name: min(second for second, _ in results) for name, results in found.items()}
    print_table(length, seconds, {name: max(size for _, size in results) for name, results in found.items()})
    names = ("loop over tokens", "transformers", "transformers, chunk 64")
    for name, least in zip(names, LEAST[length], strict=True):
        assert seconds[name] / seconds["mcaflow"] >= least, name


def print_table(length: int, seconds: dict[str, float], memory: dict[str, int]) -> None:
    table: Any = Table(f"{length} tokens", "ms", "tokens/s", "peak MiB", "mcaflow is faster by")
    for name, second in seconds.items():
        row = f"{second * 1e3:.0f}", f"{length / second:,.0f}", f"{memory[name] / 2**20:.0f}"
        table.add_row(name, *row, f"{second / seconds['mcaflow']:.1f} ×")
    Console(width=100).print(table)
