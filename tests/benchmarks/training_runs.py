"""What `test_training` times, each as a rank of the pool: this package, LLaMA-Factory, and Megatron-Core alone.

All train the same model on the same rows, `global_batch_size` a step, one row per micro batch, and return the seconds
of each step from making its batches to the updated weights.
"""

import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from mca_lib.data.token_store import TokenStoreWriter

VOCAB = 49152
ROW, ROWS_PER_STEP = 512, 2
SIZE = 1536
"""Of the matrices whose product says how fast the machine can be."""


def make_model(directory: Path, layers: int) -> Path:
    """SmolLM2-135M with `layers` of its 30 layers, random weights, and a tokenizer that nobody uses."""
    from mca_lib.tiny_models import make_tiny_model

    return make_tiny_model(
        directory,
        "llama",
        vocab_size=VOCAB,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.02,
        tie_word_embeddings=True,
    )


def make_store(directory: Path, rows: int) -> Path:
    """Packs of three documents, all tokens with loss but the first of each."""
    random = np.random.default_rng(0)
    lengths = (ROW // 2, ROW // 4, ROW - ROW // 2 - ROW // 4)
    with TokenStoreWriter(directory / "train") as writer:
        for _ in range(rows):
            writer.add_row([(random.integers(0, VOCAB, n), np.ones(n, dtype=bool)) for n in lengths])
    return directory


def run_train(folder: str, name: str, steps: int, threads: int, options: dict[str, Any]) -> list[float]:
    """This package or, with use_mca false, LLaMA-Factory, as the stage *train* runs it."""
    import torch

    from mca_lib.run_train import main
    from mca_lib.trainers.progress import read_log

    torch.set_num_threads(threads)
    out = Path(folder, name)
    out.mkdir(exist_ok=True)
    arguments = {
        "model_name_or_path": f"{folder}/model",
        "token_store": f"{folder}/store",
        "output_dir": str(out),
        "max_steps": steps,
        "global_batch_size": ROWS_PER_STEP,
        "per_device_train_batch_size": 1,
        "logging_steps": 1,
        "learning_rate": 1e-4,
        "save_strategy": "no",
        **options,
    }
    (out / "arguments.json").write_text(json.dumps(arguments))
    main([str(out / "arguments.json")])
    return [line["step_seconds"] for line in read_log(out) if "loss" in line]


def bare_loop(folder: str, steps: int, threads: int, bf16: bool) -> list[float]:
    """Megatron-Core without this package's trainer: its model of our layers, DDP, optimizer and schedule."""
    import torch
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    from mca_lib.models.config import McaModelConfig
    from mca_lib.models.layer_spec import block_spec
    from mca_lib.models.transformer_config import transformer_config
    from mca_lib.parallel import initialize_model_parallel
    from mca_lib.trainers import TrainingArguments

    torch.set_num_threads(threads)
    args = TrainingArguments(output_dir=folder, bf16=bf16)
    initialize_model_parallel(args)
    mca = McaModelConfig.from_pretrained(f"{folder}/model")
    config = transformer_config(mca, args)
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(mca, config, None),
        vocab_size=VOCAB,
        max_sequence_length=mca.max_position_embeddings,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    ddp = DistributedDataParallel(config, settings, Float16Module(config, model) if bf16 else model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-4, clip_grad=1.0, bf16=bf16, use_distributed_optimizer=True), [ddp]
    )
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    bounds = torch.tensor([0, ROW // 2, 3 * ROW // 4, ROW], dtype=torch.int32)
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    packed = PackedSeqParams(
        qkv_format="thd", max_seqlen_q=ROW // 2, max_seqlen_kv=ROW // 2, **dict.fromkeys(names, bounds)
    )
    positions_1S = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(bounds)])[None]

    def forward(batches: Any, chunk: Any) -> Any:
        ids_1S = next(batches)
        losses_1S = chunk(ids_1S, positions_1S, None, labels=ids_1S.roll(-1, 1), packed_seq_params=packed)
        count = torch.tensor(ROW, dtype=torch.int32)
        return losses_1S, lambda losses: (losses.sum(), count, {})

    run, seconds = get_forward_backward_func(), []
    for _ in range(steps):
        began = time.monotonic()
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        run(
            forward_step_func=forward,
            data_iterator=iter([torch.randint(VOCAB, (1, ROW)) for _ in range(ROWS_PER_STEP)]),
            model=ddp,
            num_microbatches=ROWS_PER_STEP,
            seq_length=ROW,
            micro_batch_size=1,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        assert math.isfinite(norm)
        seconds.append(time.monotonic() - began)
    return seconds


def flops_and_peak(folder: str, threads: int, bf16: bool) -> tuple[float, float]:
    """(operations that a step needs, operations per second of this machine's matrix products)."""
    import torch

    from mca_lib.models.config import McaModelConfig
    from mca_lib.models.flops import step_flops

    torch.set_num_threads(threads)
    left, right = (torch.randn(SIZE, SIZE).to(torch.bfloat16 if bf16 else torch.float32) for _ in range(2))
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        torch.mm(left, right)
        seconds.append(time.perf_counter() - began)
    lengths = np.array([ROW // 2, ROW // 4, ROW // 4] * ROWS_PER_STEP)
    flops = step_flops(McaModelConfig.from_pretrained(f"{folder}/model"), lengths)
    return float(flops), 2 * SIZE**3 / min(seconds)
