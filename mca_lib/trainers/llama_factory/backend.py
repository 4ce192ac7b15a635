"""Training by LLaMA-Factory 0.9.5: its `run_pt`, `run_sft` and `run_dpo`, on the rows and by the schedule of a run.

Model, loss, optimizer, reference model, adapters and loop are LLaMA-Factory's and transformers'. Ours are the micro
batches (`rows`), the learning rate (Megatron's schedule, so that both backends have the same), and some mends of the
loss (`trainers`). There is no seam for these, so the trainer classes and their `get_dataset` are replaced for the run
by subclasses and a function of ours. None of it is a documented API: `tests/mca_lib/trainers/test_llama_factory.py`
holds the signatures, and compares what comes out with Megatron-Core's.

One process trains once: LLaMA-Factory keeps state in its modules.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

# Read on import; see mca_lib/data/llamafactory.py.
os.environ.setdefault("DISABLE_VERSION_CHECK", "1")
os.environ.setdefault("LLAMAFACTORY_VERBOSITY", "ERROR")

import huggingface_hub.constants
import torch.distributed as dist
from llamafactory.hparams import get_train_args
from llamafactory.train.dpo import trainer as dpo_trainer
from llamafactory.train.dpo import workflow as dpo_workflow
from llamafactory.train.pt import workflow as pt_workflow
from llamafactory.train.sft import workflow as sft_workflow

from mca_lib.adapters.peft_files import AdapterFiles
from mca_lib.adapters.settings import lora_config
from mca_lib.checkpoint.base import base_digest
from mca_lib.checkpoint.collective import from_rank_0
from mca_lib.checkpoint.retention import STATE_NAME, Retention
from mca_lib.checkpoint.sealed import naming
from mca_lib.checkpoint.training import find_checkpoint
from mca_lib.data.indexed_rows import Rows
from mca_lib.errors import ConfigError
from mca_lib.models.config import McaModelConfig, read_json
from mca_lib.parallel import init_process_group
from mca_lib.platforms import current_platform
from mca_lib.trainers.identity import identify_rows
from mca_lib.trainers.idle import idle_fields
from mca_lib.trainers.llama_factory import check_longest, check_model, files, rows
from mca_lib.trainers.llama_factory.record import Record
from mca_lib.trainers.llama_factory.trainers import PairTrainer, TokenTrainer
from mca_lib.trainers.optimizer import make_scheduler
from mca_lib.trainers.peak import flops_counter, peak_flops
from mca_lib.trainers.preference import PreferenceArguments
from mca_lib.trainers.progress import Meter, Totals
from mca_lib.trainers.row_checks import longest_document
from mca_lib.trainers.schedule import Schedule
from mca_lib.trainers.stopping import StopRequest
from mca_lib.trainers.tracking import tracker_callbacks

if TYPE_CHECKING:
    from mca_lib.trainers.arguments import FinetuningArguments, ModelArguments
    from mca_lib.trainers.training_args import TrainingArguments

_FULL = 1 << 20
"""Bytes; a disk with less left is taken to be full."""

STAGES: dict[str, tuple[Any, ModuleType, ModuleType, str]] = {
    "pt": (pt_workflow.run_pt, pt_workflow, pt_workflow, "CustomTrainer"),
    "sft": (sft_workflow.run_sft, sft_workflow, sft_workflow, "CustomSeq2SeqTrainer"),
    "dpo": (dpo_workflow.run_dpo, dpo_workflow, dpo_trainer, "CustomDPOTrainer"),
}
"""Its function, the module whose `get_dataset` that calls, and where the name of its trainer class is looked up."""


def train(
    training_args: "TrainingArguments",
    model_args: "ModelArguments",
    finetuning_args: "FinetuningArguments",
    source: Path,
    train_rows: Rows,
    eval_rows: Rows | None,
    preference: PreferenceArguments | None,
) -> None:
    """Train `source` and leave the files that `McaTrainer` leaves; all ranks.

    Args:
        source: MCA or Hugging Face directory.
        preference: with stage dpo.

    Raises:
        ConfigError: the backend cannot do it, or loss or gradient are not finite any more.
        SystemExit: with status 143 after SIGTERM, when the checkpoint, or after the last step the result, is written.
    """
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    init_process_group(current_platform().backend)
    config = McaModelConfig.from_pretrained(source)
    is_lora = finetuning_args.finetuning_type == "lora"
    check_model(config, adapters=is_lora)
    for split in filter(None, (train_rows, eval_rows)):
        check_longest(config, longest_document(split))
    output_dir = Path(training_args.output_dir)
    shape = training_args.batch_shape(dist.get_world_size())
    schedule = training_args.schedule(len(train_rows), shape)
    base = model_args.weights_digest or base_digest(source)
    lora = AdapterFiles(config, lora_config(finetuning_args), base) if is_lora else None
    in_pairs = finetuning_args.stage == "dpo"
    make_item = rows.pair_item if in_pairs else rows.token_item
    micro_batches = rows.MicroBatches(train_rows, shape, schedule.rows, schedule.total_steps, make_item)
    data: dict[str, Any] = {"train_dataset": micro_batches}
    if eval_rows is not None:
        size = training_args.per_device_eval_batch_size
        data["eval_dataset"] = rows.evaluation(eval_rows, size, shape.data_parallel_size, make_item)

    identify_rows(train_rows)
    run = _identity(training_args, finetuning_args, schedule, train_rows, base, preference)
    found = find_checkpoint(output_dir, run)
    saved = read_json(found / STATE_NAME, ConfigError) if found else {"step": 0, "totals": {}}
    start, adapter = from_rank_0(lambda: _prepare(training_args, source, base, output_dir, lora))
    has_eval = eval_rows is not None
    arguments = _arguments(
        training_args, finetuning_args, start, found, micro_batches=micro_batches.per_step, has_eval=has_eval
    )
    if preference is not None:
        arguments |= vars(preference)
    peak = peak_flops(output_dir, training_args.params_dtype)
    # Not in the Trainer's own folder, which is emptied.
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(output_dir / "runs"))
    trackers = tracker_callbacks(training_args.report_to) if dist.get_rank() == 0 else []
    with StopRequest() as stop:
        record = Record(
            output_dir,
            schedule,
            micro_batches,
            in_pairs=in_pairs,
            run=run,
            keep=Retention(training_args.save_total_limit, training_args.save_keep_every),
            totals=Totals(**saved["totals"]),
            step=saved["step"],
            meter=Meter(saved["step"], schedule.total_steps, dist.get_world_size(), peak),
            flops=flops_counter(config, lora.lora_config if lora else None),
            stop=stop,
        )
        rate = _rate(training_args, schedule.total_steps)
        _run(finetuning_args.stage, arguments, adapter, record, trackers, data, rate)
        final = Path(training_args.final_dir) if training_args.final_dir else output_dir / "final"
        trained = output_dir / files.OUTPUT
        if lora is not None:
            from_rank_0(lambda: files.write_trained_adapter(trained, adapter, lora, final))
        else:
            from_rank_0(lambda: files.write_model(trained, start, source, final))
        record.finish()
    dist.destroy_process_group()


def _prepare(
    args: "TrainingArguments", source: Path, base: str, output_dir: Path, lora: AdapterFiles | None
) -> tuple[Path, Path | None]:
    """The directories to start from; rank 0 only."""
    half = "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"
    output_dir.mkdir(parents=True, exist_ok=True)
    files.empty(output_dir / files.OUTPUT)
    # Weights that are trained are fp32 beside autocast, and so must be those of a reference that agrees with them.
    start = files.hugging_face_directory(source, base, output_dir, half if lora else "float32")
    return start, files.initial_adapter(lora, args.seed, output_dir) if lora else None


def _run(
    stage: str,
    arguments: dict[str, Any],
    adapter: Path | None,
    record: Record,
    trackers: list[Any],
    data: dict[str, Any],
    rate: Callable[[int], float],
) -> None:
    """Call LLaMA-Factory's function of the stage."""
    function, workflow, home, name = STAGES[stage]
    try:
        model_args, data_args, training_args, finetuning_args, generating_args = get_train_args(arguments)
    except ValueError as error:
        raise ConfigError(f"LLaMA-Factory: {' '.join(str(error).split())}") from None
    # Not among the arguments, which are split at commas.
    model_args.adapter_name_or_path = [str(adapter)] if adapter else None
    ours = PairTrainer if record.in_pairs else TokenTrainer
    trainer_class = type(name, (ours, getattr(home, name)), {"record": record, "rate": staticmethod(rate)})
    further = [generating_args] if stage == "sft" else []
    replaced = _replaced(home, name, trainer_class), _replaced(workflow, "get_dataset", lambda *_, **__: data)
    output = Path(training_args.output_dir)
    with replaced[0], replaced[1], naming(output), _full_disk_named(output):
        function(model_args, data_args, training_args, finetuning_args, *further, callbacks=[record, *trackers])


@contextlib.contextmanager
def _full_disk_named(output_dir: Path) -> Iterator[None]:
    """OSError when nothing is left of the disk: torch.save, given a path by the Trainer, loses the reason."""
    try:
        yield
    except RuntimeError as error:
        if shutil.disk_usage(output_dir).free >= _FULL:
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(output_dir)) from error


@contextlib.contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def _rate(args: "TrainingArguments", total_steps: int) -> Callable[[int], float]:
    """Megatron's schedule as a function of the step."""
    scheduler = make_scheduler(args, SimpleNamespace(param_groups=[]), total_steps)

    def share(step: int) -> float:
        scheduler.num_steps = step
        return scheduler.get_lr({}) / args.learning_rate

    return share


def _identity(
    args: "TrainingArguments",
    finetuning_args: "FinetuningArguments",
    schedule: Schedule,
    train_rows: Rows,
    base: str,
    preference: PreferenceArguments | None,
) -> dict[str, Any]:
    """What must be the same for a checkpoint to be resumed; the number of ranks may differ."""
    names = ("learning_rate", "min_learning_rate", "decay_ratio", "decay_style", "weight_decay", "adam_beta1",
             "adam_beta2", "adam_epsilon", "max_grad_norm", "seed", "bf16", "fp16")  # fmt: skip
    idle = idle_fields(args.lr_scheduler_type.value, args.max_steps, mtp_layers=0)
    of_adapters = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_rslora")
    has_adapters = finetuning_args.finetuning_type == "lora"
    return {
        "backend": "LLaMA-Factory",
        "base model": base,
        "rows": len(train_rows),
        "tokens": train_rows.num_tokens,
        "data": train_rows.digest,
        "total_steps": schedule.total_steps,
        "global_batch_size": schedule.global_batch_size,
        "lr_scheduler_type": args.lr_scheduler_type.value,
        "warmup_steps": args.get_warmup_steps(schedule.total_steps),
        **{name: getattr(args, name) for name in names if name not in idle},
        "stage": finetuning_args.stage,
        "adapters": {name: getattr(finetuning_args, name) for name in of_adapters} if has_adapters else None,
        "preference": None if preference is None else vars(preference),
    }


def _arguments(
    args: "TrainingArguments",
    finetuning_args: "FinetuningArguments",
    start: Path,
    found: Path | None,
    *,
    micro_batches: int,
    has_eval: bool,
) -> dict[str, Any]:
    """What `get_train_args` reads."""
    names = (
        *("per_device_eval_batch_size", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
        *("max_grad_norm", "bf16", "fp16", "seed", "use_cpu", "logging_steps", "save_steps", "eval_steps"),
    )
    return {
        "model_name_or_path": str(start),
        "stage": finetuning_args.stage,
        "finetuning_type": finetuning_args.finetuning_type,
        "do_train": True,
        "do_eval": has_eval,
        # The names are asked for and not looked up, and no text is encoded.
        "dataset": "token_store",
        "eval_dataset": "token_store" if has_eval else None,
        "template": "empty",
        "disable_shuffling": True,
        # One item is a micro batch; the whole run is one epoch.
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": micro_batches,
        "num_train_epochs": 1.0,
        **{name: getattr(args, name) for name in names},
        "save_strategy": args.save_strategy.value,
        "eval_strategy": args.eval_strategy.value,
        "optim": "adamw_torch",
        "average_tokens_across_devices": True,
        "logging_nan_inf_filter": False,
        # Its own wrapper of activation checkpointing does not work with transformers 5.24.
        "disable_gradient_checkpointing": True,
        "activation_checkpointing": args.recompute_granularity == "full",
        "activation_checkpointing_kwargs": {"use_reentrant": False},
        "ddp_find_unused_parameters": False,
        "output_dir": str(Path(args.output_dir) / files.OUTPUT),
        "resume_from_checkpoint": found and str(found),
        "report_to": "none",  # the trackers come as callbacks, which resume
        "disable_tqdm": True,
    }
