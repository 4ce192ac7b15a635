"""Hybrids trained at every parallel layout: losses and gradient norms against those of one rank, step by step.

    python -m tests.acceptance.hybrid_layouts [--steps 3] FOLDER

Two tiny models, of dense and of MoE layers, with Mamba layers between. Rows pack documents; the last lines compare the
same documents packed and one by one. fp32. Exit status 1 when a figure differs by more than 1e-5, relative.
"""

import argparse
import sys
import warnings
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.mca_lib.trainers.hybrid_training import LAYOUTS, make_sources, run, run_packings
from tests.ranks import RankPool

TOLERANCE = 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    warnings.simplefilter("ignore")
    pool, worst = RankPool(), 0.0
    pool.run_ranks(1, make_sources, options.folder)
    for model, layouts in LAYOUTS.items():
        table = Table("layout", "ranks", "first loss", "last loss", "Δ loss", "Δ gradient norm", title=model)
        alone = None
        for layout, (ranks, _) in layouts.items():
            steps = run(pool.run_ranks, options.folder, model, layout, max_steps=options.steps)
            alone = steps if alone is None else alone
            worst = max(worst, _add_row(table, layout, ranks, steps, alone))
        for layout in ("one rank", "CP2"):
            packed, single = run_packings(pool.run_ranks, options.folder, model, layout, options.steps)
            worst = max(worst, _add_row(table, f"{layout}: packed, to one by one", layouts[layout][0], packed, single))
        Console(width=120).print(table)
    pool.close()
    return int(worst > TOLERANCE)


def _add_row(table: Table, name: str, ranks: int, steps: np.ndarray, reference: np.ndarray) -> float:
    """Adds a line; returns its larger difference."""
    loss, norm = np.abs(steps / reference - 1).max(axis=0)
    first, last = steps[[0, -1], 0]
    table.add_row(name, str(ranks), f"{first:.6f}", f"{last:.6f}", f"{loss:.1e}", f"{norm:.1e}")
    return max(loss, norm)


if __name__ == "__main__":
    sys.exit(main())
