"""The same training on Megatron-Core and by LLaMA-Factory's trainers: losses and gradient norms, step by step, in fp32.

    python -m tests.acceptance.backends [--steps 12] FOLDER

A tiny model, packed rows of which the last step of an epoch has fewer; `mca_lib.run_train` in forked ranks. Prints a
table. Exit status 1 when a curve differs by more than 1e-4, relative to its value at that step.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mca_lib.ranks import RankPool
from tests.mca_lib.checkpoint.expert_ranks import make_sources
from tests.mca_lib.trainers.preference_training import make_pair_store
from tests.mca_lib.trainers.test_llama_factory import history, make_small_model, run
from tests.mca_lib.trainers.training import make_store

TOLERANCE = 1e-4
LORA = {"finetuning_type": "lora", "lora_target": "all"}
OTHER_FAMILIES = ("qwen2-moe", "qwen3-moe", "gemma3", "minimax-m2", "olmo2", "seed-oss")
# Name → ranks, model and arguments.
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "pt": (1, "model", {"stage": "pt"}),
    "pt, linear to a tenth, micro batch of 2": (
        1,
        "model",
        {"stage": "pt", "lr_scheduler_type": "linear", "min_learning_rate": 5e-4, "per_device_train_batch_size": 2},
    ),
    "sft": (1, "model", {}),
    "sft, two ranks": (2, "model", {}),
    "sft, activations recomputed": (1, "model", {"recompute_granularity": "full"}),
    "sft, warmup_stable_decay": (
        1,
        "model",
        {"lr_scheduler_type": "warmup_stable_decay", "decay_ratio": 0.5, "decay_style": "minus_sqrt"},
    ),
    "sft, LoRA": (1, "model", LORA),
    "sft, LoRA, two ranks": (2, "model", LORA | {"use_rslora": True}),
    **{f"sft, {variant}": (1, variant, {}) for variant in OTHER_FAMILIES},
    "dpo": (1, "model", {"stage": "dpo"}),
    "dpo, two ranks": (2, "model", {"stage": "dpo", "dpo_label_smoothing": 0.2, "pref_ftx": 0.5}),
    "dpo, LoRA": (1, "model", {"stage": "dpo", **LORA}),
    **{name: (1, "model", {"stage": "dpo", "pref_loss": name}) for name in ("hinge", "ipo", "orpo", "simpo")},
}
MEASURES = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")


def distance(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], name: str) -> float:
    """Largest difference at a step, by the value there; of rewards, which begin at 0, by the curve's largest one."""
    a, b = (history(lines, (name,)) for lines in (ours, theirs))
    scale = np.abs(a).max() if name in MEASURES else np.abs(a)
    return float((np.abs(a - b) / np.maximum(scale, 1e-30)).max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    pool, worst = RankPool(), 0.0
    pool.run_ranks(1, make_small_model, folder / "model")
    pool.run_ranks(1, make_sources, folder, OTHER_FAMILIES, "float32")
    for name in ("tokenizer.json", "tokenizer_config.json"):  # LLaMA-Factory wants one
        for model in OTHER_FAMILIES:
            (folder / model / name).write_bytes((folder / "model" / name).read_bytes())
    for split, rows in (("train", 11), ("eval", 3)):
        make_store(folder / "store", rows, split=split)
        make_pair_store(folder / "pairs", rows, split=split)
    table = Table(
        "training", "first loss", "last loss", "|Δ loss|", "|Δ grad norm|", "|Δ measures|", "|Δ held-out loss|"
    )
    for name, (ranks, model, changes) in CASES.items():
        if options.only and options.only not in name:
            continue
        store = folder / ("pairs" if changes.get("stage") == "dpo" else "store")
        arguments = {"model_name_or_path": str(folder / model), "token_store": str(store), "do_eval": True, **changes}
        arguments["max_steps"] = options.steps
        ours, theirs = (
            pool.run_ranks(ranks, run, str(folder), f"{name} {backend}", arguments | {"use_mca": backend == "mca"})[0]
            for backend in ("mca", "llama-factory")
        )
        measures = [measure for measure in MEASURES if measure in ours[0]]
        distances = [distance(ours, theirs, "loss"), distance(ours, theirs, "grad_norm")]
        distances.append(max((distance(ours, theirs, measure) for measure in measures), default=0.0))
        distances.append(abs(theirs[-1]["eval_loss"] / ours[-1]["eval_loss"] - 1))
        worst = max(worst, *distances)
        ends = (f"{history(ours)[step, 0]:.5f}" for step in (0, -1))
        table.add_row(name, *ends, *(f"{value:.1e}" for value in distances))
    pool.close()
    Console(width=140).print(table)
    return int(not worst <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
