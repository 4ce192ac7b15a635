"""A real chat model trained four ways on real data: SFT in full and by LoRA, DPO, and pretraining.

    make smollm2
    python -m tests.acceptance.real_training --folder DIR --model smollm2-hf --sft ALPACA --dpo PAIRS --pt TEXT

Prints loss at the start and at the end, and the held-out figures of the model before and after; samples are in the
report that each row names. Exit status 1 where the held-out loss did not fall (DPO: where the reward margin is not
above 0). Four to twelve minutes each on two CPU cores; a second call finds everything in the store.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tasks.store import ArtifactStore
from tests.acceptance.harness import ROOT, Complaint, Workplace, artifacts, check, launch, show

COMMON = {
    "training.global_batch_size": 4,
    "training.save_steps": 0,
    "training.warmup_ratio": 0.1,
    "dataset.max_rows": 400,
    "dataset.cutoff_len": 512,
    "eval.max_rows": 60,
    "eval.num_samples": 3,
    "eval.max_new_tokens": 48,
}
LORA = {"training.finetuning_type": "lora", "training.learning_rate": 2e-4, "lora.r": 16, "lora.alpha": 32}
PAIRS = {
    "training.stage": "dpo",
    "training.learning_rate": 1e-5,
    "training.global_batch_size": 8,
    "dataset.formatting": "sharegpt",
    "dataset.eval_fraction": 0.15,
}
TEXT = {"training.stage": "pt", "training.learning_rate": 5e-5, "dataset.formatting": "text", "dataset.template": None}
TRAININGS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {"training.learning_rate": 5e-5}),
    "sft, lora": ("sft", LORA),
    "dpo": ("dpo", {**PAIRS, "dataset.ranking": True}),
    "pt": ("pt", TEXT),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    for name in ("sft", "dpo", "pt"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    store, rows, failures = folder / "store", [], []
    for name, (kind, fields) in TRAININGS.items():
        data = getattr(options, kind)
        if data is None:
            continue
        fields = (
            COMMON
            | fields
            | {
                "model.name_or_path": str(options.model.absolute()),
                "dataset.files": [str(data.absolute())],
                "training.max_steps": options.steps,
            }
        )
        settings = [part for key, value in fields.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        recipe, log = ROOT / "deployments" / "recipes" / "smollm2-sft.yaml", folder / f"{name.replace(', ', '-')}.log"
        run = launch(recipe, store, log, Workplace(folder).environment(), *settings)
        check(run.wait(3600) == 0, f"{name} ended with {run.process.returncode}:\n{run.output()[-2000:]}")
        figures, verdict = _figures(store)
        failures += [] if verdict else [name]
        rows.append((name, *figures))
    show(
        f"{options.model.name}, {options.steps} steps",
        ("training", "loss first, last", "held-out loss", "measure", "seconds", "report"),
        rows,
    )
    print(f"went the wrong way: {', '.join(failures)}" if failures else "all went the right way")
    return int(bool(failures))


def _figures(store: Path) -> tuple[tuple[str, ...], bool]:
    """What the newest training and evaluation of the store say, and whether that is progress."""
    records, opened = artifacts(store), ArtifactStore(store)
    evaluation = [artifact for artifact in opened.ls() if artifact.stage == "evaluate"][-1]
    metrics = json.loads((evaluation.path / "metrics.json").read_text())
    stats = records["train"].stats
    curve = list(stats["curves"]["loss"].values())
    base, trained = metrics["models"].values()
    measure, verdict = f"accuracy {base['accuracy']:.1%} → {trained['accuracy']:.1%}", trained["loss"] < base["loss"]
    if pairs := metrics.get("preference"):
        measure = f"reward margin {pairs['reward_margin']:+.3f} ± {pairs['reward_margin_stderr']:.3f}, "
        measure += f"reward accuracy {pairs['reward_accuracy']:.1%}"
        verdict = pairs["reward_margin"] > 0
    return (
        f"{curve[0]:.4f}, {curve[-1]:.4f}",
        f"{base['loss']:.4f} → {trained['loss']:.4f} ± {metrics['difference']['loss_stderr']:.4f}",
        measure,
        f"{stats['seconds']:.0f}",
        f"evaluate/{evaluation.key[:12]}/report.md",
    ), verdict


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Complaint as complaint:
        sys.exit(str(complaint))
