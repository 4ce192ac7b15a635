"""Hybrids that go on from a transformer's training, across changes of layout: steps, weights, masters and moments.

    python -m tests.acceptance.gpt_to_hybrid FOLDER

For each row a tiny transformer trains and saves a checkpoint at one layout; a hybrid starts from that at another, and
makes the next steps. Loss and gradient norm are compared with those of the transformer going on, and what was loaded
with the checkpoint, bit by bit. Rows with M start as exactly the transformer (zero output projections): the loss of
their first step is compared. Exit status 1 when a figure is beyond its limit. fp32 unless the row says bf16.
"""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.mca_lib.checkpoint import source_training
from tests.mca_lib.checkpoint.source_training import DENSE, EXPERTS, FRESH, MAMBA, OPTIONS, SAVED, differences
from tests.mca_lib.trainers.training import history, train
from tests.ranks import RankPool

LIMITS = {"fp32": 2e-6, "bf16": 2e-2, "fp16": 2e-3}
"""Relative difference of a loss or a gradient norm; roundings of the sums of another layout."""
FRESH_EXPERTS = "M*E*EM*E*E"

ONE = (1, {})
DP2, DP4 = (2, {}), (4, {})
TP2 = (2, {"tensor_model_parallel_size": 2})
SP2 = (2, {**TP2[1], "sequence_parallel": True})
PP2 = (2, {"pipeline_model_parallel_size": 2})
VPP2 = (2, {**PP2[1], "virtual_pipeline_model_parallel_size": 2})
CP2 = (2, {"context_parallel_size": 2})
TP2_PP2 = (4, {**TP2[1], **PP2[1]})
EP2 = (2, {"expert_model_parallel_size": 2})
EP4 = (4, {"expert_model_parallel_size": 4})
EP2_PP2 = (4, {**EP2[1], **PP2[1]})
ETP1 = (2, {**SP2[1], "expert_tensor_parallel_size": 1})
TP2_EP2 = (4, {**SP2[1], **EP2[1]})
TP2_EP2_ETP1 = (4, {**SP2[1], **EP2[1], "expert_tensor_parallel_size": 1})

NAMES = {
    id(layout): name
    for name, layout in {
        "one rank": ONE,
        "DP2": DP2,
        "DP4": DP4,
        "TP2": TP2,
        "TP2 SP": SP2,
        "PP2": PP2,
        "PP2 VPP2": VPP2,
        "CP2": CP2,
        "TP2 PP2": TP2_PP2,
        "EP2": EP2,
        "EP4": EP4,
        "EP2 PP2": EP2_PP2,
        "TP2 ETP1": ETP1,
        "TP2 EP2": TP2_EP2,
        "TP2 EP2 ETP1": TP2_EP2_ETP1,
    }.items()
}


@dataclass(frozen=True)
class Row:
    """A transformer's layout, a hybrid's pattern and layout, and what both have beside."""

    pattern: str
    before: tuple[int, dict[str, Any]]
    after: tuple[int, dict[str, Any]]
    both: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        extra = "".join(f" {name}" for name, value in self.both.items() if value)
        return f"{self.pattern} {NAMES[id(self.before)]} → {NAMES[id(self.after)]}{extra}"


ROWS = [
    *(Row(DENSE, ONE, after) for after in (ONE, DP2, TP2, SP2, PP2, VPP2, CP2, TP2_PP2)),
    *(Row(DENSE, before, ONE) for before in (DP2, TP2, PP2, VPP2, CP2)),
    *(Row(DENSE, a, b) for a, b in ((TP2, PP2), (PP2, TP2), (DP2, CP2), (TP2_PP2, DP4), (DP4, TP2_PP2))),
    *(Row(DENSE, a, b, {"bf16": True}) for a, b in ((ONE, ONE), (DP2, TP2), (TP2, PP2))),
    *(Row(DENSE, a, b, {"fp16": True}) for a, b in ((ONE, ONE), (DP2, TP2))),
    *(Row(EXPERTS, ONE, after) for after in (ONE, DP2, SP2, PP2, ETP1, CP2, EP2, TP2_EP2)),
    *(Row(EXPERTS, EP2, after) for after in (EP2, EP4, EP2_PP2, TP2_EP2, TP2_EP2_ETP1, ETP1, ONE, SP2)),
    *(Row(EXPERTS, before, EP2) for before in (EP4, TP2_EP2, TP2_EP2_ETP1, SP2)),
    *(Row(EXPERTS, ETP1, after) for after in (ONE, SP2, TP2_EP2)),
    Row(EXPERTS, EP2, TP2_EP2, {"bf16": True}),
    *(Row(FRESH, ONE, after) for after in (ONE, DP2, TP2, SP2, PP2, CP2)),
    *(Row(FRESH, before, TP2) for before in (PP2, DP2)),
    Row(FRESH, DP2, TP2, {"bf16": True}),
    Row(FRESH, DP2, DP2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    Row(FRESH, DP2, TP2, {"preflight": True}),
    Row(FRESH_EXPERTS, ONE, SP2),
    Row(FRESH_EXPERTS, EP2, TP2_EP2),
]


@dataclass(frozen=True)
class Measured:
    """What a row gave."""

    steps: float
    """Largest relative difference of a loss or a gradient norm."""
    compared: int
    differing: list[str]
    fresh: int
    limit: float

    @property
    def passed(self) -> bool:
        return self.steps <= self.limit and not self.differing


def measure(ranks: Any, folder: Path, row: Row, number: int) -> Measured:
    """Train the transformer, start the hybrid from it, and compare."""
    place = folder / f"row-{number}"
    model = str(folder / ("experts" if "E" in row.pattern else "dense"))
    (before, saved), (after, options) = row.before, row.after
    arguments = (train, model, f"{folder}/store", f"{place}/transformer", {**OPTIONS, **row.both, **saved})
    straight = history(ranks(before, *arguments))[SAVED:]
    source = place / "transformer" / f"checkpoint-{SAVED}"
    options = {**OPTIONS, **row.both, **options, "hybrid_layer_pattern": row.pattern, "load_checkpoint": str(source)}
    if "M" in row.pattern:
        options |= {**MAMBA, "fresh_layers": "zero_output"}
    went_on = history(ranks(after, train, model, f"{folder}/store", f"{place}/hybrid", options))
    ranks(after, source_training.load_and_save, model, f"{place}/loaded", options)
    found = differences(place / "loaded" / f"checkpoint-{SAVED}", source, row.pattern)
    if "M" in row.pattern:
        straight, went_on = straight[:1, :1], went_on[:1, :1]
    steps = float(np.max(np.abs(went_on - straight) / straight))
    limit = next((limit for name, limit in LIMITS.items() if row.both.get(name)), LIMITS["fp32"])
    return Measured(steps, found.compared, found.differing, len(found.fresh), limit)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    ranks = RankPool().run_ranks
    ranks(1, source_training.make_models, folder)
    table = Table("transformer → hybrid", "steps: largest difference", "tensors, same bits", "fresh", "")
    failed = 0
    for number, row in enumerate(ROWS):
        found = measure(ranks, folder, row, number)
        failed += not found.passed
        same = f"{found.compared - len(found.differing)} of {found.compared}"
        table.add_row(row.name, f"{found.steps:.1e}", same, str(found.fresh), "" if found.passed else "FAILED")
        print(row.name, f"{found.steps:.1e}", same, found.fresh, *found.differing[:3], flush=True)
    Console(width=140).print(table)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
