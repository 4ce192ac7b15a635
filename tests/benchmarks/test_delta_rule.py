"""The gated delta rule, forward and backward, against a loop over tokens and against transformers' torch path.

One row of tokens in fp32, one thread, heads as those of Qwen3-Next, 2 of its 32. The competitors take turns, each in a
fresh process; the fastest of the repeats counts, and peak memory is what the process grew by. transformers takes 64
tokens at once, as here.
"""

from collections.abc import Callable

import pytest
import torch

from mca_lib.ranks import RankPool
from tests.benchmarks.test_ssd import peak, print_table, timed

HEADS, HEAD_DIM = 2, 128
ROUNDS = 3
# Tokens -> at least so many times as fast as the loop, as transformers.
LEAST = {512: (5.0, 1.1), 2048: (8.0, 1.3)}


def ours() -> Callable[..., torch.Tensor]:
    from mca_lib.models.linear_attention.delta_rule import gated_delta_rule

    return gated_delta_rule


def loop() -> Callable[..., torch.Tensor]:
    from tests.mca_lib.models.linear_attention.delta_recurrence import recurrence

    return recurrence


def transformers() -> Callable[..., torch.Tensor]:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    return lambda q, k, v, g, beta: torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0]


COMPETITORS = {"mcaflow": ours, "loop over tokens": loop, "transformers": transformers}


def measure(name: str, length: int) -> tuple[float, int]:
    """Seconds of a forward and backward pass, and bytes that it needed."""
    rule = COMPETITORS[name]()
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, length, HEADS, HEAD_DIM, generator=generator) for _ in range(3))
    query, key = (torch.nn.functional.normalize(t, dim=-1) for t in (query, key))
    log_decay, beta = (torch.rand(1, length, HEADS, generator=generator) for _ in range(2))
    inputs = [query, key, value, -0.1 * log_decay, beta]
    for tensor in inputs:
        tensor.requires_grad_()
    rule(*[tensor[:, :64] for tensor in inputs]).sum().backward()
    before = peak()
    seconds = timed(lambda: rule(*inputs).sum().backward())
    return seconds, peak() - before


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("length", LEAST)
def test_the_rule_is_faster_than_a_loop_and_than_transformers(length: int) -> None:
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in COMPETITORS}
    with RankPool() as pool:
        for _ in range(ROUNDS):
            for name, results in found.items():
                results += pool.run_ranks(1, measure, name, length, timeout=600.0)
    seconds = {name: min(second for second, _ in results) for name, results in found.items()}
    print_table(length, seconds, {name: max(size for _, size in results) for name, results in found.items()})
    for name, least in zip(("loop over tokens", "transformers"), LEAST[length], strict=True):
        assert seconds[name] / seconds["mcaflow"] >= least, name
