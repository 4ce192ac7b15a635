"""Training speed on one GPU: a Llama of 1.2 billion weights (the shape of Llama-3.2-1B) in bf16, and in fp8 where there
is Transformer Engine. Random weights and tokens; nothing is downloaded.

    python tests/gpu/train_bench.py            a few minutes on one GPU
    python tests/gpu/train_bench.py --tiny     the same with a tiny shape, on a CPU too

Each precision is a process of its own, so that its peak memory is its own. MFU is what the training log says: the
operations that the model needs, over the speed of this device's own matrix products.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LARGE = {
    "shape": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "row": 4096,
    "rows_per_step": 8,
    "steps": 20,
}
TINY = {
    "shape": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "row": 256,
    "rows_per_step": 2,
    "steps": 6,
}
NOT_COUNTED = 3
"""First steps, in which kernels are chosen and memory is reserved."""


def train(case: dict[str, Any], precision: str) -> dict[str, Any]:
    """One training in this process; its figures."""
    sys.path.insert(0, str(ROOT))
    import numpy as np
    import torch

    from mca_lib.data.token_store import TokenStore, TokenStoreWriter
    from mca_lib.models.gpt import McaGPTModel
    from mca_lib.models.model_factory import VirtualModels
    from mca_lib.models.registry import config_from_hf
    from mca_lib.models.transformer_config import transformer_config
    from mca_lib.parallel import initialize_model_parallel
    from mca_lib.trainers import McaTrainer, TrainingArguments
    from mca_lib.trainers.progress import read_log

    row, count = case["row"], case["rows_per_step"]
    hf = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        **case["shape"],
    }
    with tempfile.TemporaryDirectory() as folder:
        random = np.random.default_rng(0)
        with TokenStoreWriter(f"{folder}/train") as writer:
            for _ in range(count):
                lengths = (row // 2, row // 4, row - row // 2 - row // 4)
                writer.add_row([(random.integers(0, hf["vocab_size"], n), np.ones(n, dtype=bool)) for n in lengths])
        args = TrainingArguments(
            output_dir=folder,
            bf16=True,
            fp8="hybrid" if precision == "fp8" else None,
            global_batch_size=count,
            per_device_train_batch_size=1,
            max_steps=case["steps"],
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
        )
        initialize_model_parallel(args, args.seed)
        config = config_from_hf(hf)
        model = VirtualModels(McaGPTModel, config, transformer_config(config, args))
        trainer = McaTrainer(model, args, TokenStore.open(f"{folder}/train"))
        trainer.save_model = lambda directory: None  # a model without a tokenizer, which nobody wants
        trainer.train()
        log = read_log(Path(folder))
    counted = log[NOT_COUNTED:]
    return {
        "precision": precision,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "layers": model.config.transformer_impl,
        "parameters": model.num_parameters(),
        "tokens_per_second": round(statistics.median(line["tokens_per_second"] for line in counted)),
        "mfu": statistics.median(line["mfu"] for line in counted),
        "peak_memory_mb": max(line["memory_mb"] for line in log),
        "first_loss": log[0]["loss"],
        "last_loss": log[-1]["loss"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a shape that a CPU trains in seconds")
    parser.add_argument("--precision", choices=["bf16", "fp8"], help="this one alone, in this process")
    options = parser.parse_args()
    if options.precision:
        print(json.dumps(train(TINY if options.tiny else LARGE, options.precision)))
        return 0
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    failed = 0
    for precision in ["bf16", "fp8"] if has_engine else ["bf16"]:
        command = [sys.executable, __file__, "--precision", precision, *(["--tiny"] if options.tiny else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        failed += done.returncode != 0
        print(done.stdout.splitlines()[-1] if done.returncode == 0 else f"{precision}: failed")
    if not has_engine:
        print("fp8: not run, there is no Transformer Engine")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
