"""Adapters and preferences of every kind of model: dense, of experts, of latent attention, of gated delta nets.

    python -m tests.acceptance.families FOLDER [--model NAME …]

Tiny models, fp32. Adapters whose B is not zero are exported: PEFT loads them on transformers' base model, and merged
they are a model of transformers; both have the logits of Megatron's model with adapters. Preferences (DPO) train on
one rank, on two that split each layer, and by plain torch: the loss is ln 2 at first, falls, and is the same each time.
Prints a table. Exit status 1 where a figure is beyond its limit.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mca_lib.ranks import RankPool
from tests.mca_lib.adapters.lora_ranks import logits_four_ways
from tests.mca_lib.checkpoint.expert_ranks import make_sources
from tests.mca_lib.trainers import preference_training

LOGITS = 1e-5
"""Largest |Δ| of a logit, relative to the largest logit."""
CURVES = 1e-4
"""Largest |Δ| of a loss, relative. Adam turns rounding in small gradients into steps."""
STEPS = 6

TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
# Variant → (kind, layout of two ranks).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("dense", TENSOR),
    "phi3-longrope": ("dense", TENSOR),
    "gpt-oss": ("experts", {**TENSOR, "expert_tensor_parallel_size": 1}),
    "glm4-moe": ("experts", TENSOR),
    "deepseek-mtp": ("latent attention", TENSOR),
    "qwen3-next": ("gated delta nets", TENSOR),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one; may be repeated")
    arguments = parser.parse_args()
    names, folder = arguments.model or list(MODELS), arguments.folder.resolve()
    titles = ("PEFT", "merged", "base", "loss at first − ln 2", "last loss", "plain torch", "TP2")
    table, bad = Table("model", "kind", *titles), []
    with RankPool() as pool:
        pool.run_ranks(1, make_sources, folder, names, "float32")
        pairs = preference_training.make_pair_store(folder / "pairs", rows=8)
        for name in names:
            kind, layout = MODELS[name]
            figures = adapters(pool, folder, name) | preferences(pool, folder, name, pairs, layout)
            bad += [f"{name}: {title}" for title in beyond(figures)]
            table.add_row(
                name, kind, *(f"{figures[t]:.4f}" if t == "last loss" else f"{figures[t]:.1e}" for t in titles)
            )
    Console(width=130).print(table)
    print(f"Logits relative to the largest, at most {LOGITS:g}; losses of {STEPS} steps, at most {CURVES:g}")
    print("\n".join(["Beyond a limit:", *bad]) if bad else "All within their limits")
    return int(bool(bad))


def adapters(pool: RankPool, folder: Path, name: str) -> dict[str, float]:
    """How far logits are from those of Megatron's model with adapters."""
    (logits,) = pool.run_ranks(1, logits_four_ways, f"{folder}/{name}", f"{folder}/{name} adapters", {})
    found = logits["megatron"]
    return {
        title: ((logits[way] - found).abs().max() / found.abs().max()).item()
        for title, way in (("PEFT", "peft"), ("merged", "merged"), ("base", "base"))
    }


def preferences(pool: RankPool, folder: Path, name: str, pairs: Path, layout: dict[str, Any]) -> dict[str, float]:
    """Losses, and how far those of others are from one rank's."""
    model, options = f"{folder}/{name}", {"max_steps": STEPS}
    alone = losses(pool.run_ranks(1, preference_training.train, model, str(pairs), f"{model} alone", options, {}))
    split = pool.run_ranks(2, preference_training.train, model, str(pairs), f"{model} TP2", {**options, **layout}, {})
    (plain,) = pool.run_ranks(1, preference_training.plain_training, model, str(pairs), STEPS, {})
    distances = {
        title: float((np.abs(other - alone) / alone).max())
        for title, other in (("TP2", losses(split)), ("plain torch", np.array(plain)[:, 0]))
    }
    return {"loss at first − ln 2": alone[0] - math.log(2), "last loss": alone[-1], **distances}


def losses(values: list[dict[str, Any]]) -> np.ndarray:
    return preference_training.history(values)[:, 0]


def beyond(figures: dict[str, float]) -> list[str]:
    """Titles of figures that are beyond their limit."""
    limits = {"PEFT": LOGITS, "merged": LOGITS, "loss at first − ln 2": 1e-6, "plain torch": CURVES, "TP2": CURVES}
    bad = [title for title, limit in limits.items() if not abs(figures[title]) <= limit]
    bad += [] if figures["base"] > 0.01 else ["base"]
    return bad + ([] if figures["last loss"] < math.log(2) else ["last loss"])


if __name__ == "__main__":
    sys.exit(main())
