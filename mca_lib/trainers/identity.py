"""What a run is about. A checkpoint of a run that differs in any of it is not resumed; the layout may differ."""

from dataclasses import asdict
from typing import Any

from mca_lib.adapters.settings import targets_of
from mca_lib.checkpoint.base import base_digest
from mca_lib.checkpoint.collective import from_rank_0
from mca_lib.data.indexed_rows import IndexedRows, Rows
from mca_lib.data.indexed_split import sampled_digest
from mca_lib.data.statistics import split_digest
from mca_lib.models import VirtualModels
from mca_lib.trainers.idle import idle_fields
from mca_lib.trainers.schedule import BatchShape, Schedule
from mca_lib.trainers.training_args import TrainingArguments

_MEGATRON_FIELDS = (
    "fp8",
    "min_learning_rate",
    "decay_ratio",
    "decay_style",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_bias_update_rate",
    "mtp_loss_weight",
    "freeze",
)


def identify_model(model: VirtualModels) -> None:
    """Find the digest of the weights that the model came with, where nobody has said it; collective."""
    if model.base_digest is None and model.source is not None:
        model.base_digest = base_digest(model.source)


def identify_rows(rows: Rows) -> None:
    """Find the digest of what the split holds, where nobody has said it; collective.

    Rank 0 reads a token store once, and of an indexed split the indices and a sample.
    """
    find = sampled_digest if isinstance(rows, IndexedRows) else split_digest
    if rows.digest is None:
        rows.digest = from_rank_0(lambda: find(rows))


def run_identity(
    model: VirtualModels, args: TrainingArguments, rows: Rows, schedule: Schedule, shape: BatchShape
) -> dict[str, Any]:
    """Names and values, as an error shows them."""
    idle = idle_fields(args.lr_scheduler_type.value, args.max_steps, model.mca_config.mtp_num_layers)
    return {
        **_model_identity(model),
        **_hybrid_identity(model, args),
        "rows": len(rows),
        "tokens": rows.num_tokens,
        "data": rows.digest,
        "total_steps": schedule.total_steps,
        "global_batch_size": shape.global_batch_size,
        "seed": args.seed,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": args.lr_scheduler_type.value,
        "warmup_steps": args.get_warmup_steps(schedule.total_steps),
        "weight_decay": args.weight_decay,
        "adam": [args.adam_beta1, args.adam_beta2, args.adam_epsilon],
        "max_grad_norm": args.max_grad_norm,
        **{name: getattr(args, name) for name in _MEGATRON_FIELDS if name not in idle},
    }


def _hybrid_identity(model: VirtualModels, args: TrainingArguments) -> dict[str, Any]:
    """Its layers, and how those that the transformer lacks were made, where the run makes them."""
    if (hybrid := model.mca_config.hybrid) is None:
        return {}
    fresh = {} if args.hybrid_layer_pattern is None else {"fresh": [args.fresh_layers, args.fresh_seed]}
    return {"hybrid": {**asdict(hybrid), **fresh}}


def _model_identity(model: VirtualModels) -> dict[str, Any]:
    """The model that training starts from, by its sizes, and by the digest of its weights."""
    config, lora = model.mca_config, model.lora_config
    named = ("model_type", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")
    identity: dict[str, Any] = {name: getattr(config, name) for name in named}
    identity["base model"] = model.base_digest
    if lora is not None:
        identity |= {
            "lora r": lora.r,
            "lora alpha": lora.lora_alpha,
            "lora dropout": lora.lora_dropout,
            "rslora": lora.use_rslora,
            "lora targets": targets_of(lora),
        }
    return identity
