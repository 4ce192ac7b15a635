"""Loss and gradient norm of every step against a plain PyTorch loop over the `transformers` model, in fp32.

    python -m tests.acceptance.reference_curves [--steps 20]

Tiny models with random weights: a dense one, and one with experts. Rows are packs of documents; the plain loop runs one
document at a time, so it knows no packing. Stage pt has loss on every token, sft on some. Exit status 1 when a figure
differs by more than 1e-5 of its size.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mca_lib.ranks import RankPool
from tests.mca_lib.checkpoint.expert_ranks import make_sources
from tests.mca_lib.trainers.training import history, make_model, make_store, plain_training, train

TOLERANCE = 1e-5
PIPELINE = {"pipeline_model_parallel_size": 2}
DENSE: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank, micro batch 1": (1, {}),
    "micro batch 2": (1, {"per_device_train_batch_size": 2}),
    "micro batch 4": (1, {"per_device_train_batch_size": 4}),
    "DP2": (2, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "TP2 with sequence parallelism": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": (2, PIPELINE),
    "PP2 in two chunks (VPP2)": (2, {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}),
    "CP2": (2, {"context_parallel_size": 2}),
    "full recomputation": (1, {"recompute_granularity": "full"}),
}
EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank, micro batch 1": (1, {}),
    "micro batch 4": (1, {"per_device_train_batch_size": 4}),
    "EP2": (2, {"expert_model_parallel_size": 2}),
    "DP2": (2, {}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    table = Table("model", "stage", "rows", "layout", "first loss", "last loss", "max Δ loss", "max Δ grad norm")
    worst = 0.0
    with tempfile.TemporaryDirectory() as directory, RankPool() as pool:
        folder = Path(directory)
        pool.run_ranks(1, make_model, folder / "dense")
        pool.run_ranks(1, make_sources, folder, ["qwen2-moe"], "float32")
        for model, stage, packed, layouts in (
            ("dense", "sft", True, DENSE),
            ("dense", "pt", True, {name: DENSE[name] for name in ("one rank, micro batch 1", "DP2", "CP2")}),
            ("dense", "sft", False, {name: DENSE[name] for name in ("one rank, micro batch 1", "micro batch 4")}),
            ("qwen2-moe", "sft", True, EXPERTS),
        ):
            rows = "packs" if packed else "documents"
            store = make_store(folder / f"{stage}-{rows}", 18, packed=packed, loss=0.7 if stage == "sft" else 1.0)
            plain = np.array(pool.run_ranks(1, plain_training, str(folder / model), str(store), steps)[0])
            for name, (ranks, options) in layouts.items():
                output = folder / f"{model}-{stage}-{rows}-{name}"
                options = {"max_steps": steps, **options}
                curves = history(pool.run_ranks(ranks, train, str(folder / model), str(store), str(output), options))
                loss, norm = (np.abs(curves - plain) / np.abs(plain)).max(axis=0)
                worst = max(worst, loss, norm)
                ends = (f"{curves[0, 0]:.4f}", f"{curves[-1, 0]:.4f}")
                table.add_row(model, stage, rows, name, *ends, f"{loss:.1e}", f"{norm:.1e}")
    Console(width=130).print(table)
    print(f"{steps} steps; largest difference {worst:.1e} of the figure, at most {TOLERANCE:g} allowed")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
