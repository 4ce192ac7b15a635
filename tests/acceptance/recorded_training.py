"""The ranks of `kill_training`: each leaves word of the tokens that it was given.

torchrun … -m tests.acceptance.recorded_training ARGS.json
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import blake3

from mca_lib.run_train import main
from tests.mca_lib.trainers.training import kill_in_step, train


def make_model(directory: Path, attention_dropout: float) -> None:
    """3 million weights, so that a checkpoint takes a moment to write."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=512, attention_dropout=attention_dropout, dtype="float32", **sizes)
    LlamaForCausalLM(config).save_pretrained(directory)


def record_samples(out: str) -> None:
    """From here on each step leaves a line: its number, and a digest of the tokens that this rank was given."""
    from mca_lib.trainers.engine import Engine

    original, path = Engine.train_step, Path(out) / f"samples-{os.environ['RANK']}.jsonl"

    def recording(self, batches):
        tokens = b"".join(batch.input_ids_1S.numpy().tobytes() for batch in batches)
        with path.open("a") as file:
            step = self.scheduler.num_steps + 1
            file.write(json.dumps({"step": step, "tokens": blake3.blake3(tokens).hexdigest()[:16]}) + "\n")
        return original(self, batches)

    Engine.train_step = recording


def train_recorded(model: str, store: str, out: str, options: dict[str, Any]) -> None:
    """One rank of a run that nobody disturbs."""
    Path(out).mkdir(exist_ok=True)
    record_samples(out)
    train(model, store, out, options)


def train_until(model: str, store: str, out: str, options: dict[str, Any], step: int) -> None:
    kill_in_step(step, signal.SIGKILL)
    train(model, store, out, options)


if __name__ == "__main__":
    record_samples(json.loads(Path(sys.argv[1]).read_text())["output_dir"])
    main(sys.argv[1:])
