"""Tokens per second of a training step, against LLaMA-Factory and a bare Megatron-Core loop in the same run.

The model has the shape of SmolLM2-135M with fewer layers (MCAFLOW_BENCH_LAYERS, 6), in fp32 or bf16. The competitors
take turns (MCAFLOW_BENCH_ROUNDS, 3, of MCAFLOW_BENCH_STEPS, 5), each in a fresh process with the same threads: two for
one rank, one each for two ranks. Of all steps but the first of each turn the median counts. MFU: the operations that
the model needs, over the fastest of the machine's matrix products of that dtype, with two threads.

All run in the environment that `mca_lib.launch` gives to ranks, so that the bare loop differs by the trainer alone; but
LLaMA-Factory, as one rank of DDP, also runs in the plain one, as its own users start it.
"""

import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from mca_lib.heap import heap_settings
from mca_lib.ranks import RankPool
from tests.benchmarks.training_runs import (
    ROW,
    ROWS_PER_STEP,
    bare_loop,
    flops_and_peak,
    make_model,
    make_store,
    run_train,
)

LAYERS = int(os.environ.get("MCAFLOW_BENCH_LAYERS", "6"))
ROUNDS, STEPS = (int(os.environ.get(f"MCAFLOW_BENCH_{name}", n)) for name, n in (("ROUNDS", 3), ("STEPS", 5)))
TIMEOUT = 900.0

PLAIN = "LLaMA-Factory"
# Name → ranks, threads of each, arguments; None is the bare loop.
RUNS: dict[str, tuple[int, int, dict[str, Any] | None]] = {
    "mcaflow": (1, 2, {}),
    "bare Megatron-Core loop": (1, 2, None),
    PLAIN: (1, 2, {"use_mca": False}),
    "LLaMA-Factory in the stage": (1, 2, {"use_mca": False}),
    "mcaflow, DP2": (2, 1, {}),
    # No TP2: the model has 9 heads. With two micro batches a third of the time of each stage is waiting.
    "mcaflow, PP2": (2, 1, {"pipeline_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[str, RankPool]]:
    """A pool of ranks for each name of `RUNS`."""
    with RankPool() as plain, RankPool(heap_settings()) as stage:
        yield {name: plain if name == PLAIN else stage for name in RUNS}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_is_faster_than_llama_factorys_and_costs_no_more_than_megatron_cores(
    pools: dict[str, RankPool], tmp_path: Path, precision: str
) -> None:
    folder, bf16 = str(tmp_path), precision == "bf16"
    pools["mcaflow"].run_ranks(1, make_model, tmp_path / "model", LAYERS)
    make_store(tmp_path / "store", ROWS_PER_STEP * STEPS)
    seconds: dict[str, list[float]] = {name: [] for name in RUNS}
    peaks = []
    for turn in range(ROUNDS):
        flops, peak = pools["mcaflow"].run_ranks(1, flops_and_peak, folder, 2, bf16)[0]
        peaks.append(peak)
        for name, (ranks, threads, options) in RUNS.items():
            pool = pools[name]
            if options is None:
                found = pool.run_ranks(ranks, bare_loop, folder, STEPS, threads, bf16, timeout=TIMEOUT)[0]
            else:
                options = options | {"bf16": bf16}
                place = f"{name} {turn}"
                found = pool.run_ranks(ranks, run_train, folder, place, STEPS, threads, options, timeout=TIMEOUT)[0]
            seconds[name] += found[1:]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ours = medians["mcaflow"]
    table = Table(precision, "ranks × threads", "tokens/s", "MFU", "mcaflow is faster by")
    for name, (ranks, threads, _) in RUNS.items():
        speed = ROW * ROWS_PER_STEP / medians[name]
        mfu = flops / medians[name] / max(peaks)
        table.add_row(name, f"{ranks} × {threads}", f"{speed:,.0f}", f"{mfu:.1%}", f"{medians[name] / ours:.2f} ×")
    Console(width=100).print(table)
    assert medians[PLAIN] / ours >= 1.2
    assert medians["bare Megatron-Core loop"] / ours >= 0.97
