"""Preference optimization here and by TRL's DPOTrainer: the same tiny model, pairs and steps, in fp32.

    python -m tests.acceptance.trl_dpo [--steps 12] FOLDER

Runs `mca_lib.run_train` by torchrun (one rank, and documents split over two) and TRL's own training loop, for each
loss, and prints how far loss, gradient norm, rewards and log-probabilities are apart at any step. Exit status 1 when
something differs by more than 1e-4, relative to the largest value of its curve. TRL comes with LLaMA-Factory.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mca_lib.data.token_store import TokenStore, TokenStoreWriter
from mca_lib.trainers.schedule import Schedule
from tests.mca_lib.trainers.preference_training import make_pair
from tests.mca_lib.trainers.training import HYPERPARAMETERS, make_model

TOLERANCE = 1e-4
PAIRS = 16
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "sigmoid, label smoothing 0.2": {"dpo_label_smoothing": 0.2},
    "hinge": {"pref_loss": "hinge"},
    "ipo": {"pref_loss": "ipo"},
}
LAYOUTS = {"one rank": (1, {}), "CP2": (2, {"context_parallel_size": 2})}
CURVES = (
    "loss",
    "grad_norm",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)

type Log = list[dict[str, float]]


def train(folder: Path, model: Path, store: Path, steps: int, ranks: int, changes: dict[str, Any]) -> Log:
    """Ours; the log."""
    folder.mkdir(parents=True)
    arguments = {
        **HYPERPARAMETERS,
        "model_name_or_path": str(model),
        "token_store": str(store),
        "output_dir": str(folder),
        "stage": "dpo",
        "max_steps": steps,
        **changes,
    }
    arguments.pop("save_steps")
    file = folder / "arguments.json"
    file.write_text(json.dumps(arguments | {"save_strategy": "no"}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with open(folder / "output.log", "w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, "-m", "mca_lib.run_train", str(file)], check=True, stdout=log, stderr=log, env=environment
        )
    return [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]


def train_by_trl(folder: Path, model: Path, store: Path, steps: int, preference: dict[str, Any]) -> Log:
    """TRL's; the log. Its data set holds the tokens of the same pairs in the order in which we take them."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from transformers.utils.import_utils import _is_package_available as find

    # TRL 0.28 takes the pair (found, version) of transformers 5.24 for true, and imports what is not installed.
    importlib.import_module("trl.import_utils")._is_package_available = lambda name, return_version=False: (
        find(name, return_version=True) if return_version else find(name, return_version=True)[0]
    )
    from trl import DPOConfig, DPOTrainer

    from mca_lib.tiny_models import make_tokenizer

    class InOrder(DPOTrainer):
        def _prepare_dataset(self, dataset, *_args, **_kwargs):
            return dataset

        def _get_train_sampler(self, *_args, **_kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    batch = HYPERPARAMETERS["global_batch_size"]
    rows = TokenStore.open(store / "train")
    schedule = Schedule(len(rows), batch, HYPERPARAMETERS["seed"], max_steps=steps)
    pairs = [_trl_row(rows, row) for step in range(steps) for row in schedule.rows(step)]
    config = DPOConfig(
        output_dir=str(folder),
        loss_type=[preference.get("pref_loss", "sigmoid")],
        beta=0.1,
        label_smoothing=preference.get("dpo_label_smoothing", 0.0),
        per_device_train_batch_size=batch,
        num_train_epochs=1,
        learning_rate=HYPERPARAMETERS["learning_rate"],
        lr_scheduler_type=HYPERPARAMETERS["lr_scheduler_type"],
        warmup_steps=HYPERPARAMETERS["warmup_steps"],
        weight_decay=HYPERPARAMETERS["weight_decay"],
        max_grad_norm=HYPERPARAMETERS["max_grad_norm"],
        max_length=None,
        max_prompt_length=None,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager") for _ in range(2)
    )
    trainer = InOrder(
        model=policy,
        ref_model=reference,
        args=config,
        train_dataset=Dataset.from_list(pairs),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


def _trl_row(rows: TokenStore, index: int) -> dict[str, list[int]]:
    """The tokens of a row's one pair, with the prompt apart."""
    (chosen, mask), (rejected, _) = (rows.document(document) for document in rows[index].documents)
    prompt = int(mask.argmax())
    return {
        "prompt_input_ids": chosen[:prompt].tolist(),
        "chosen_input_ids": chosen[prompt:].tolist(),
        "rejected_input_ids": rejected[prompt:].tolist(),
    }


def distance(ours: Log, theirs: Log, name: str) -> float:
    """Largest difference at a step, by the largest value of the curve."""
    scale = max(abs(line[name]) for line in theirs) or 1.0
    return max(abs(a[name] - b[name]) for a, b in zip(ours, theirs, strict=True)) / scale


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model, store = make_model(folder / "model"), folder / "store"
    random = np.random.default_rng(0)
    with TokenStoreWriter(store / "train") as writer:
        for _ in range(PAIRS):
            writer.add_row(make_pair(random))
    table = Table("loss", "layout", "first loss", "last loss", *CURVES)
    worst = 0.0
    for name, preference in LOSSES.items():
        theirs = train_by_trl(folder / f"TRL {name}", model, store, options.steps, preference)
        for layout, (ranks, changes) in LAYOUTS.items():
            place = folder / f"{layout} {name}"
            ours = train(place, model, store, options.steps, ranks, {**changes, **preference})
            distances = [distance(ours, theirs, curve) for curve in CURVES]
            worst = max(worst, *distances)
            ends = (f"{ours[step]['loss']:.6f}" for step in (0, -1))
            table.add_row(name, layout, *ends, *(f"{value:.1e}" for value in distances))
    Console(width=160).print(table)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
