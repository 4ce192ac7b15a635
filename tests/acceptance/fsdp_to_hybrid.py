"""Trainings that start from what Megatron-FSDP has written, at every parallel layout: tensors, and the next steps.

    python -m tests.acceptance.fsdp_to_hybrid FOLDER

Tiny models are trained for three steps in bf16 under Megatron-FSDP on two ranks. Every start is compared with that
checkpoint, tensor by tensor (weights, masters, moments: the same bits), and with how the training went on. Exit status
1 when a tensor differs, or the first loss by more than 2e-3, which is what bf16 leaves of another order of sums.
"""

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tests.mca_lib.checkpoint import fsdp_ranks
from tests.mca_lib.checkpoint.test_fsdp_load import EXPERTS, MAMBA, VOCABULARY, of_a_run, of_megatron_fsdp
from tests.mca_lib.tiny_models import SIZES, save_hf
from tests.ranks import RankPool

TOLERANCE = 2e-3
DENSE = "*-*-*-*-"
TP2, PP2, EP2 = ({f"{name}_model_parallel_size": 2} for name in ("tensor", "pipeline", "expert"))
SP, WHOLE_OPTIMIZER = {"sequence_parallel": True}, {"use_distributed_optimizer": False}

SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense, DP2": ("llama", {}),
    "dense, TP2": ("llama", TP2),
    "tied, DP2": ("llama-tied", {}),
    "MoE, DP2": ("mixtral", {}),
    "MoE, EP2": ("mixtral", EP2),
}
DENSE_STARTS: dict[str, tuple[int, dict[str, Any]]] = {
    "transformer": (1, {}),
    "transformer, DP2": (2, {}),
    "transformer, DP2, optimizer not distributed": (2, WHOLE_OPTIMIZER),
    "transformer, TP2 + SP": (2, {**TP2, **SP}),
    "transformer, PP2": (2, PP2),
    "transformer, TP2 PP2": (4, {**TP2, **PP2}),
    DENSE: (1, {"pattern": DENSE}),
    f"{DENSE}, TP2": (2, {"pattern": DENSE, **TP2}),
    f"{DENSE}, PP2": (2, {"pattern": DENSE, **PP2}),
    "M*-*-M*-*-, DP2": (2, {"pattern": "M*-*-M*-*-", **MAMBA}),
    "M*-*-M*-*-, TP2": (2, {"pattern": "M*-*-M*-*-", **MAMBA, "mamba_num_groups": 2, **TP2}),
}
MOE_STARTS: dict[str, tuple[int, dict[str, Any]]] = {
    "transformer": (1, {}),
    "transformer, TP2 + SP": (2, {**TP2, **SP}),
    "transformer, TP2 + SP, whole experts": (2, {**TP2, **SP, "expert_tensor_parallel_size": 1}),
    "transformer, EP2": (2, EP2),
    "transformer, PP2 EP2": (4, {**PP2, **EP2}),
    EXPERTS: (1, {"pattern": EXPERTS}),
    f"{EXPERTS}, EP2": (2, {"pattern": EXPERTS, **EP2}),
    f"{EXPERTS}, PP2": (2, {"pattern": EXPERTS, **PP2}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True)
    warnings.simplefilter("ignore")
    failed = 0
    with RankPool() as pool:
        for source, (model, options) in SOURCES.items():
            here = folder / source.replace(", ", "-")
            here.mkdir()
            pool.run_ranks(1, save_hf, here / "hf", model, "bfloat16")
            history = pool.run_ranks(2, fsdp_ranks.run, "write", options, here / "hf", here / "checkpoint")[0]
            table = Table(
                "start", "ranks", "tensors equal", "Δ loss", "Δ next loss", title=f"{source}, {history[0][0]:.6f}"
            )
            for name, (ranks, start) in (MOE_STARTS if model == "mixtral" else DENSE_STARTS).items():
                state = here / name.replace("*", "a")
                arguments = (start, here / "hf", here / "checkpoint", state)
                found = pool.run_ranks(ranks, fsdp_ranks.run, "go_on", *arguments)[0]["history"]
                equal, of = compared(state, here / "checkpoint", start.get("pattern"))
                first, second = (abs(a[0] / b[0] - 1) for a, b in zip(found, history, strict=True))
                fresh = "M" in start.get("pattern", "")
                failed += equal != of or (not fresh and first > TOLERANCE)
                figures = ("another model", "") if fresh else (f"{first:.1e}", f"{second:.1e}")
                table.add_row(name, str(ranks), f"{equal} of {of}", *figures)
            Console(width=120).print(table)
    return int(failed > 0)


def compared(state: Path, checkpoint: Path, pattern: str | None) -> tuple[int, int]:
    """(Tensors that are the same bits, all of the checkpoint's)."""
    ours, theirs = of_a_run(state, pattern), of_megatron_fsdp(checkpoint)
    rows = {name: SIZES["vocab_size"] if name[1] in VOCABULARY else len(tensor) for name, tensor in theirs.items()}
    same = [n for n, t in theirs.items() if n in ours and torch.equal(ours[n][: rows[n]], t[: rows[n]])]
    return len(same), len(theirs | ours)


if __name__ == "__main__":
    sys.exit(main())
