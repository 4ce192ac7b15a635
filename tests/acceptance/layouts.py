"""The same training at several parallel layouts: losses and gradient norms, step by step.

    python -m tests.acceptance.layouts --model DIR --token-store DIR [--steps 20] [--tensor 2] FOLDER

`--model` is an MCA or Hugging Face directory, `--token-store` an artifact of the stage dataset. Exit status 1 when a
loss differs from one rank's by more than 1e-4. fp32; torchrun for each layout.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

TOLERANCE = 1e-4


def layouts(tensor: int) -> dict[str, tuple[int, dict[str, Any]]]:
    """Name → ranks and arguments."""
    return {
        "one rank": (1, {}),
        "DP2": (2, {}),
        f"TP{tensor}": (tensor, {"tensor_model_parallel_size": tensor}),
        "PP2": (2, {"pipeline_model_parallel_size": 2}),
        "PP2 in two chunks": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
        "CP2": (2, {"context_parallel_size": 2}),
        f"TP{tensor} + SP": (tensor, {"tensor_model_parallel_size": tensor, "sequence_parallel": True}),
    }


def train(folder: Path, ranks: int, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """The log of one run."""
    folder.mkdir(parents=True)
    file = folder / "arguments.json"
    file.write_text(json.dumps(arguments | {"output_dir": str(folder)}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "mca_lib.run_train", str(file)]
    with open(folder / "output.log", "w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--token-store", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    common = {
        "model_name_or_path": str(options.model.resolve()),
        "token_store": str(options.token_store.resolve()),
        "global_batch_size": 8,
        "per_device_train_batch_size": 2,
        "max_steps": options.steps,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    table = Table("layout", "first loss", "last loss", "max |Δ loss|", "max |Δ grad norm|")
    reference: list[dict[str, Any]] = []
    worst = 0.0
    for name, (ranks, arguments) in layouts(options.tensor).items():
        log = train(options.folder / name.replace(" ", "-"), ranks, common | arguments)
        reference = reference or log
        loss, norm = (
            max(abs(a[key] - b[key]) for a, b in zip(log, reference, strict=True)) for key in ("loss", "grad_norm")
        )
        worst = max(worst, loss)
        table.add_row(name, f"{log[0]['loss']:.6f}", f"{log[-1]['loss']:.6f}", f"{loss:.1e}", f"{norm:.1e}")
    Console().print(table)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
