"""LoRA as ranks run it; `plain_lora` has the same by transformers, PEFT and torch alone."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.mca_lib.trainers.training import HYPERPARAMETERS

LORA = {"r": 4, "lora_alpha": 6}


def lora_config(**changes: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(**{**LORA, "target_modules": ["all-linear"], "task_type": "CAUSAL_LM", **changes})


def train_lora(model: str, store: str, out: str, options: dict[str, Any], lora: dict[str, Any]) -> dict[str, Any]:
    """One rank of a training of adapters; those are in `out`/final."""
    from mca_lib.adapters import apply_megatron_lora
    from mca_lib.checkpoint.base import base_digest
    from mca_lib.data.token_store import TokenStore
    from mca_lib.models import AutoModel
    from mca_lib.parallel import initialize_model_parallel
    from mca_lib.trainers import McaTrainer, Seq2SeqTrainingArguments
    from mca_lib.trainers.progress import read_log

    args = Seq2SeqTrainingArguments(output_dir=out, **{**HYPERPARAMETERS, **options})
    initialize_model_parallel(args, args.seed)
    models = AutoModel.from_pretrained(model, args)
    apply_megatron_lora(models, lora_config(**lora), args.seed)
    models.base_digest = base_digest(model)
    result = McaTrainer(models, args, TokenStore.open(Path(store) / "train")).train()
    return {"result": asdict(result), "log": [line for line in read_log(Path(out)) if "loss" in line]}


def train_preferences(model: str, store: str, out: str, options: dict[str, Any], lora: dict[str, Any]) -> Any:
    """One rank of a preference training of adapters: its log."""
    from mca_lib.adapters import apply_megatron_lora
    from mca_lib.data.token_store import TokenStore
    from mca_lib.models import AutoModel
    from mca_lib.parallel import initialize_model_parallel
    from mca_lib.trainers import DPOTrainer, Seq2SeqTrainingArguments
    from mca_lib.trainers.progress import read_log

    args = Seq2SeqTrainingArguments(output_dir=out, **{**HYPERPARAMETERS, **options})
    initialize_model_parallel(args, args.seed)
    models = AutoModel.from_pretrained(model, args)
    apply_megatron_lora(models, lora_config(**lora), args.seed)
    DPOTrainer(models, args, TokenStore.open(Path(store) / "train")).train()
    return [line for line in read_log(Path(out)) if "loss" in line]


def initial_B(name: str, outputs: int, r: int) -> Any:
    """Not zero, so that A has a gradient."""
    import torch

    number = int.from_bytes(hashlib.sha256(f"B {name}".encode()).digest()[:7])
    return torch.randn(outputs, r, generator=torch.Generator().manual_seed(number)) * 0.05


def adapter_and_gradients(
    model: str, store: str, adapter: str, gradients: str, options: dict[str, Any], lora: dict[str, Any]
) -> float:
    """Save adapters with a B that is not zero, and beside them their gradients of one step; returns its loss."""
    import torch

    from mca_lib.adapters import apply_megatron_lora
    from mca_lib.adapters.peft_files import save_adapter
    from mca_lib.data.token_store import TokenStore
    from mca_lib.models import AutoModel
    from mca_lib.parallel import initialize_model_parallel
    from mca_lib.trainers import McaTrainer, Seq2SeqTrainingArguments

    # The distributed optimizer leaves each rank with its share of the gradients.
    options = {"use_distributed_optimizer": False, **options}
    args = Seq2SeqTrainingArguments(output_dir=adapter + "-out", **{**HYPERPARAMETERS, **options})
    initialize_model_parallel(args, args.seed)
    models = AutoModel.from_pretrained(model, args)
    apply_megatron_lora(models, lora_config(**lora), args.seed)
    with torch.no_grad():
        for pair in _pairs(models):
            if pair.lora_B is not None:
                whole = initial_B(pair.name, pair.shape[0], pair.r)
                pair.lora_B.copy_(torch.cat([whole[start:stop] for start, stop in pair.rows]))
    rows = TokenStore.open(Path(store) / "train")
    trainer = McaTrainer(models, args, rows)
    save_adapter(models, Path(adapter))
    engine = trainer.engine
    batches = trainer._batches(rows, trainer.schedule.rows(0), trainer.shape)
    for chunk in engine.chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    metrics = engine._metrics(engine._forward_backward(batches, engine.objective, forward_only=False), batches, 0.0)
    with torch.no_grad():
        for pair in _pairs(models):
            for parameter in pair.parameters():
                parameter.data = parameter.main_grad.clone()
    save_adapter(models, Path(gradients))
    return metrics.loss


def _pairs(models: Any) -> Iterator[Any]:
    for model in models:
        for layer in model.adapters.layers:
            yield from layer.pairs


def logits_four_ways(model: str, folder: str, lora: dict[str, Any]) -> dict[str, Any]:
    """Logits [S, V] with adapters whose B is not zero: {"megatron", "peft", "merged"}; and without, "base"."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from mca_lib.adapters import apply_megatron_lora
    from mca_lib.adapters.peft_files import Adapter, save_adapter
    from mca_lib.converter.export import export_hf
    from mca_lib.converter.parity import mca_logits
    from mca_lib.models import AutoModel
    from mca_lib.parallel import DistributingParallelArguments, initialize_model_parallel

    def transformers_model(directory: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()

    initialize_model_parallel(DistributingParallelArguments())
    models = AutoModel.from_pretrained(model).eval()
    models.save_pretrained(f"{folder}/mca")
    apply_megatron_lora(models, lora_config(**lora), HYPERPARAMETERS["seed"])
    with torch.no_grad():
        for pair in _pairs(models):
            pair.lora_B.copy_(initial_B(pair.name, pair.shape[0], pair.r))
    save_adapter(models, Path(folder, "adapter"))
    export_hf(f"{folder}/mca", f"{folder}/merged", adapter=Adapter(f"{folder}/adapter", models.mca_config))
    ids = torch.arange(1, 25)
    with torch.no_grad():
        base = transformers_model(model)
        logits = {"megatron": mca_logits(models.eval(), ids.tolist()), "base": base(ids[None]).logits[0]}
        logits["merged"] = transformers_model(f"{folder}/merged")(ids[None]).logits[0]
        adapted = PeftModel.from_pretrained(base, f"{folder}/adapter").eval()
        return {**logits, "peft": adapted(ids[None]).logits[0]}


def replicated_after_dropout(
    model: str, store: str, out: str, options: dict[str, Any], lora: dict[str, Any]
) -> dict[str, Any]:
    """PEFT name → matrix, of those that the ranks hold whole, after a training."""
    from mca_lib.adapters import adapters
    from mca_lib.adapters.peft_files import peft_name

    made = []
    original = adapters._adapted

    def remember(*args: Any) -> Any:
        made.append(original(*args))
        return made[-1]

    adapters._adapted = remember
    train_lora(model, store, out, options, lora)
    return {
        peft_name(pair.name, matrix): getattr(pair, matrix).detach().clone()
        for layer in made
        for pair in layer.pairs
        for matrix in [("lora_B" if layer.is_row else "lora_A")]
    }
