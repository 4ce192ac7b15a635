"""What the trainer's tests share: a tiny model, token stores, and a training run as a rank executes it."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mca_lib.data.token_store import TokenStoreWriter

VOCAB = 128
HYPERPARAMETERS = {
    "global_batch_size": 4,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "per_device_train_batch_size": 1,
    "logging_steps": 1,
    "save_steps": 0,
    "seed": 5,
}


def make_model(directory: Path, attention_dropout: float = 0.0, tied: bool = False, vocab_size: int = VOCAB) -> Path:
    """A Hugging Face Llama with random weights, no tokenizer: 4 layers, 32 wide."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.1,
        attention_dropout=attention_dropout,
        tie_word_embeddings=tied,
        dtype="float32",
    )
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def make_store(
    directory: Path,
    rows: int,
    *,
    split: str = "train",
    seed: int = 0,
    masked: Sequence[int] = (),
    packed: bool = True,
    loss: float = 0.7,
) -> Path:
    """`rows` packs of one to three documents of random tokens, or single documents.

    Args:
        masked: rows without any loss.
        loss: share of the other rows' tokens that have loss.
    """
    random = np.random.default_rng(seed)
    with TokenStoreWriter(directory / split) as writer:
        for row in range(rows):
            documents = []
            for _ in range(random.integers(1, 4) if packed else 1):
                length = int(random.integers(5, 20))
                # Few distinct tokens, so that there is something to learn.
                tokens = random.integers(0, 12, length)
                mask = random.random(length) < (0.0 if row in masked else loss)
                documents.append((tokens, mask))
            writer.add_row(documents)
    return directory


def train(model: str, store: str, out: str, options: dict[str, Any]) -> dict[str, Any]:
    """One rank of a training run. Returns its result and its log."""
    from mca_lib.data.indexed_rows import open_split
    from mca_lib.models import AutoModel
    from mca_lib.parallel import initialize_model_parallel
    from mca_lib.trainers import McaTrainer, Seq2SeqTrainingArguments
    from mca_lib.trainers.progress import read_log

    args = Seq2SeqTrainingArguments(output_dir=out, **{**HYPERPARAMETERS, **options})
    initialize_model_parallel(args, args.seed)
    splits = [Path(store) / name for name in ("train", "eval")]
    stores = [open_split(path) if path.is_dir() else None for path in splits]
    result = McaTrainer(AutoModel.from_pretrained(model, args), args, *stores).train()
    log = [line for line in read_log(Path(out)) if "loss" in line]
    return {"result": asdict(result), "log": log}


def in_buckets[T](function: Callable[..., T], *arguments: Any) -> T:
    """Call it with gradient buffers of many buckets, which is what overlap is about."""
    from mca_lib.trainers import gradients

    gradients.BUCKET_SIZE = 2000
    return function(*arguments)


def train_in_buckets(model: str, store: str, out: str, options: dict[str, Any], kill_at: int = 0) -> dict[str, Any]:
    """`train` in many buckets; may be killed in a step."""
    if kill_at:
        kill_in_step(kill_at, signal.SIGKILL)
    return in_buckets(train, model, store, out, options)


def kill_in_step(step: int, kill: int) -> None:
    """From here on, this rank gets the signal `kill` in the middle of the given step; SIGTERM only rank 0."""
    from mca_lib.trainers.engine import Engine

    original, done = Engine._forward_backward, []

    def counting(self, *args, forward_only):
        if not forward_only:
            done.append(1)
            if len(done) == step and (kill == signal.SIGKILL or os.environ["RANK"] == "0"):
                os.kill(os.getpid(), kill)
        return original(self, *args, forward_only=forward_only)

    Engine._forward_backward = counting


def plain_training(
    model: str, store: str, steps: int, balance: dict[str, float] | None = None, frozen: tuple[str, ...] = ()
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step, by transformers and torch alone, one document at a time.

    Args:
        balance: coefficients of the losses of routers, which are in the gradients and not in the loss.
        frozen: parts of names of what is not trained.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, get_scheduler

    from mca_lib.data.indexed_rows import open_split
    from mca_lib.trainers.schedule import Schedule

    settings, rows = HYPERPARAMETERS, open_split(Path(store) / "train")
    schedule = Schedule(len(rows), settings["global_batch_size"], settings["seed"], max_steps=steps)
    sees = "vision_config" in json.loads(Path(model, "config.json").read_text())
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    network = auto.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").train()
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    optimizer = torch.optim.AdamW(decay_groups(network), lr=settings["learning_rate"])
    scheduler = get_scheduler(settings["lr_scheduler_type"], optimizer, settings["warmup_steps"], steps)
    routers, routed, history = _routed(network) if balance else [], {}, []
    for router in routers:
        router.register_forward_pre_hook(lambda router, inputs: routed.setdefault(router, []).append(inputs[0]))
    for step in range(steps):
        loss_sum, count, balance_sum, tokens = torch.zeros(()), 0, torch.zeros(()), 0
        for index in schedule.rows(step):
            row, begin = rows[index], 0
            for number, length in enumerate(row.document_lengths):
                ids = torch.from_numpy(row.input_ids[begin : begin + length])[None]
                images = _images(model, network, ids, row.images[number]) if row.images else {}
                labels = torch.from_numpy(row.labels[begin : begin + length])
                logits = network(input_ids=ids, **images).logits[0]
                loss_sum = loss_sum + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
                count += int((labels != -100).sum())
                begin += int(length)
            balance_sum = balance_sum + sum(
                _router_losses(router, torch.cat([x.flatten(0, -2) for x in routed.pop(router)]), balance, network)
                for router in routers
            )
            tokens += begin
        loss = loss_sum / count
        optimizer.zero_grad()
        (loss + balance_sum / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), settings["max_grad_norm"])
        optimizer.step()
        scheduler.step()
        history.append((loss.item(), norm.item()))
    return history


def decay_groups(network: Any) -> list[dict[str, Any]]:
    """For an optimizer: weights that decay, and the others.

    Biases of experts are stacked in transformers, whose Trainer knows them by their name.
    """
    kept = {name for name, p in network.named_parameters() if p.ndim <= 1 or name.endswith("bias")}
    decayed = [p for name, p in network.named_parameters() if name not in kept]
    others = [p for name, p in network.named_parameters() if name in kept]
    decay = HYPERPARAMETERS["weight_decay"]
    return [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def _images(model: str, network: Any, ids: Any, stored: Sequence[Any]) -> dict[str, Any]:
    """A document's images by transformers' own processor."""
    import io

    from PIL import Image
    from transformers import Qwen2VLImageProcessorPil

    if not stored:
        return {}
    images = [Image.open(io.BytesIO(image.data.tobytes())) for image in stored]
    found = Qwen2VLImageProcessorPil.from_pretrained(model)(images=images, return_tensors="pt")
    return {**found, "mm_token_type_ids": (ids == network.config.image_token_id).int()}


def _routed(network: Any) -> list[Any]:
    return [module for name, module in network.named_modules() if name.endswith("mlp.gate")]


def _router_losses(router: Any, hidden_NH: Any, balance: dict[str, float], network: Any) -> Any:
    """Times the row's tokens: Switch Transformer's loss (equation 4), and ST-MoE's z-loss (equation 5)."""
    import torch

    logits_NE = torch.nn.functional.linear(hidden_NH, router.weight)
    experts, k = logits_NE.shape[1], network.config.num_experts_per_tok
    probabilities_NE = logits_NE.softmax(-1)
    shares_E = torch.bincount(probabilities_NE.topk(k).indices.flatten(), minlength=experts) / (k * len(hidden_NH))
    aux = experts * (shares_E * probabilities_NE.mean(0)).sum()
    z = logits_NE.logsumexp(-1).square().mean()
    return len(hidden_NH) * (balance["moe_aux_loss_coeff"] * aux + balance["moe_z_loss_coeff"] * z)


def history(values: list[dict[str, Any]]) -> np.ndarray:
    """[steps, 2] loss and gradient norm, from what `train` returned on each rank."""
    return np.array([(line["loss"], line["grad_norm"]) for line in values[0]["log"]])


def weights(directory: Path) -> dict[str, Any]:
    """Tensors of an MCA checkpoint directory, by name, read without any process group."""
    return stored_tensors(directory / "model")


def stored_tensors(directory: Path) -> dict[str, Any]:
    """The same of a torch_dist directory."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(directory)
    found = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(meta.size, dtype=meta.properties.dtype)
        for name, meta in found.items()
        if isinstance(meta, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())
