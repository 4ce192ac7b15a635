"""Training by LLaMA-Factory 0.9.5: its `run_pt`, `run_sft` and `run_dpo`, on the rows and by the schedule of a run.

Model, loss, optimizer, reference model, adapters and loop are LLaMA-Factory's and transformers'. Ours are the micro
batches (`rows`), the course of the learning rate (Megatron's, so that it is the same in both backends), and what makes
the numbers those of the whole step:

    tokens  the loss is divided by the tokens of the step over all ranks (transformers does that)
    pairs   the loss is divided by the pairs of the step over all ranks. LLaMA-Factory takes a mean of micro batches'
            means, in which a pair weighs more where fewer share its micro batch
    padding transformers gives the embedding of the padding token no gradient, even where it is a token of the text, as
            where padding and end of text are one token. Here nothing with a loss is padding
    losses  TRL 0.28 takes the loss's name as an argument and LLaMA-Factory does not pass it: `hinge` and `ipo` would
            train `sigmoid`

There is no seam for these, so its trainer classes and their `get_dataset` are replaced for the run by
subclasses and a function of ours. None of it is a documented API: `tests/mca_lib/trainers/test_llama_factory.py` holds
the signatures, and compares what comes out with Megatron-Core's.

One process trains once: LLaMA-Factory keeps state in its modules.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

# Read on import; see mca_lib/data/llamafactory.py.
os.environ.setdefault("DISABLE_VERSION_CHECK", "1")
os.environ.setdefault("LLAMAFACTORY_VERBOSITY", "ERROR")

import huggingface_hub.constants
import torch
import torch.distributed as dist
from llamafactory.hparams import get_train_args
from llamafactory.train.dpo import trainer as dpo_trainer
from llamafactory.train.dpo import workflow as dpo_workflow
from llamafactory.train.pt import workflow as pt_workflow
from llamafactory.train.sft import workflow as sft_workflow

from mca_lib.adapters.peft_files import AdapterFiles
from mca_lib.adapters.settings import lora_config, targets_of
from mca_lib.adapters.targets import adapter_elements
from mca_lib.checkpoint.base import base_digest
from mca_lib.checkpoint.collective import from_rank_0
from mca_lib.checkpoint.retention import STATE_NAME, Retention
from mca_lib.checkpoint.training import find_checkpoint
from mca_lib.data.indexed_rows import Rows
from mca_lib.data.token_store import IGNORE_INDEX
from mca_lib.errors import ConfigError
from mca_lib.models.config import McaModelConfig, read_json
from mca_lib.models.flops import step_flops
from mca_lib.parallel import init_process_group
from mca_lib.platforms import current_platform
from mca_lib.trainers.llama_factory import check_model, files, rows
from mca_lib.trainers.llama_factory.record import Record
from mca_lib.trainers.optimizer import make_scheduler
from mca_lib.trainers.pairs import PairObjective
from mca_lib.trainers.peak import peak_flops
from mca_lib.trainers.preference import PreferenceArguments
from mca_lib.trainers.progress import Meter, Totals
from mca_lib.trainers.schedule import Schedule
from mca_lib.trainers.stopping import StopRequest

if TYPE_CHECKING:
    from mca_lib.trainers.arguments import FinetuningArguments, ModelArguments
    from mca_lib.trainers.training_args import TrainingArguments

STAGES: dict[str, tuple[Any, ModuleType, ModuleType, str]] = {
    "pt": (pt_workflow.run_pt, pt_workflow, pt_workflow, "CustomTrainer"),
    "sft": (sft_workflow.run_sft, sft_workflow, sft_workflow, "CustomSeq2SeqTrainer"),
    "dpo": (dpo_workflow.run_dpo, dpo_workflow, dpo_trainer, "CustomDPOTrainer"),
}
"""Its function, the module whose `get_dataset` that calls, and where the name of its trainer class is looked up."""


class StoreTrainer:
    """Comes before one of LLaMA-Factory's trainers."""

    record: Record
    rate: Callable[[int], float]
    """Step → share of the learning rate."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs | {"data_collator": lambda items: items[0]})
        self.model.get_input_embeddings().padding_idx = None
        if not self.record.in_pairs and not self.model_accepts_loss_kwargs:
            raise RuntimeError(
                f"{type(self.model).__name__} takes no num_items_in_batch: its loss would be a mean of means"
            )

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, self.rate)
        return self.lr_scheduler

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        self.record.fetch()
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.record.add_loss(loss)
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(self.record.line(logs, self.args) if "grad_norm" in logs else logs, *args, **kwargs)

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Means over the whole evaluation split; transformers would take a mean of micro batches' means."""
        self.model.eval()
        totals: dict[str, float] = {}
        for batch in self.get_eval_dataloader():
            for name, value in self.sums(self._prepare_inputs(batch)).items():
                totals[name] = totals.get(name, 0.0) + float(value)
        values = torch.tensor(list(totals.values()), dtype=torch.float64, device=self.args.device)
        dist.all_reduce(values)
        *sums, count = values.tolist()
        means = self.record.evaluated(dict(zip(totals, sums, strict=False)), count)
        super().log(dict(means))
        return means


class TokenTrainer(StoreTrainer):
    """Pretraining and supervised fine-tuning."""

    def sums(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Of a micro batch: the loss, and at the end the tokens that have one."""
        one = torch.ones((), device=self.args.device)
        return {
            "loss": self.model(**batch, num_items_in_batch=one).loss,
            "count": (batch["labels"] != IGNORE_INDEX).sum(),
        }


class PairTrainer(StoreTrainer):
    """Preference optimization."""

    def dpo_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().dpo_loss(*args, loss_type=self.loss_type, **kwargs)

    def get_batch_loss_metrics(
        self, model: Any, batch: dict[str, torch.Tensor], train_eval: str = "train"
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The micro batch's part of the mean over all pairs of the step. It is divided by the micro batches later."""
        pairs = int(batch[rows.PAIRS])
        loss, means = self._means(model, batch)
        self.record.add_measures({name: pairs * value for name, value in means.items()})
        share = pairs * dist.get_world_size() / self.record.count()
        return loss * share * self.current_gradient_accumulation_steps, {}

    def sums(self, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Of a micro batch: the loss, the measures, and at the end the pairs."""
        pairs = int(batch[rows.PAIRS])
        loss, means = self._means(self.model, batch)
        return {"loss": pairs * loss, **{name: pairs * value for name, value in means.items()}, "count": pairs}

    def _means(self, model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        tensors = {name: tensor for name, tensor in batch.items() if name != rows.PAIRS}
        loss, means = super().get_batch_loss_metrics(model, tensors, "train")
        return loss, {name: means[name] for name in PairObjective.measures}


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
        SystemExit: with status 143 after SIGTERM, when the checkpoint is written.
    """
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    init_process_group(current_platform().backend)
    config = McaModelConfig.from_pretrained(source)
    is_lora = finetuning_args.finetuning_type == "lora"
    check_model(config, adapters=is_lora)
    output_dir = Path(training_args.output_dir)
    shape = training_args.batch_shape(dist.get_world_size())
    schedule = Schedule(
        num_rows=len(train_rows),
        global_batch_size=shape.global_batch_size,
        seed=training_args.seed,
        num_train_epochs=training_args.num_train_epochs,
        max_steps=training_args.max_steps,
    )
    base = model_args.weights_digest or base_digest(source)
    lora = AdapterFiles(config, lora_config(finetuning_args), base) if is_lora else None
    in_pairs = finetuning_args.stage == "dpo"
    make_item = rows.pair_item if in_pairs else rows.token_item
    micro_batches = rows.MicroBatches(train_rows, shape, schedule.rows, schedule.total_steps, make_item)
    data: dict[str, Any] = {"train_dataset": micro_batches}
    if eval_rows is not None:
        size = training_args.per_device_eval_batch_size
        data["eval_dataset"] = rows.evaluation(eval_rows, size, shape.data_parallel_size, make_item)

    run = _identity(training_args, finetuning_args, schedule, train_rows, base, preference)
    found = find_checkpoint(output_dir, run)
    saved = read_json(found / STATE_NAME, ConfigError) if found else {"step": 0, "totals": {}}
    start, adapter = from_rank_0(lambda: _prepare(training_args, source, output_dir, lora))
    has_eval = eval_rows is not None
    arguments = _arguments(
        training_args, finetuning_args, start, found, micro_batches=micro_batches.per_step, has_eval=has_eval
    )
    if preference is not None:
        arguments |= vars(preference)
    elements = adapter_elements(config, targets_of(lora.lora_config), lora.lora_config.r) if lora else None
    peak = peak_flops(output_dir, training_args.params_dtype)
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
            flops=lambda lengths_D: step_flops(config, lengths_D, elements),
            stop=stop,
        )
        _run(finetuning_args.stage, arguments, adapter, record, data, _rate(training_args, schedule.total_steps))
    final = Path(training_args.final_dir) if training_args.final_dir else output_dir / "final"
    trained = output_dir / files.OUTPUT
    if lora is not None:
        from_rank_0(lambda: files.write_trained_adapter(trained, adapter, lora, final))
    else:
        from_rank_0(lambda: files.write_model(trained, start, source, final))
    record.finish()
    dist.destroy_process_group()


def _prepare(
    args: "TrainingArguments", source: Path, output_dir: Path, lora: AdapterFiles | None
) -> tuple[Path, Path | None]:
    """The directories to start from; rank 0 only."""
    half = "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"
    output_dir.mkdir(parents=True, exist_ok=True)
    files.empty(output_dir / files.OUTPUT)
    # Weights that are trained are fp32 beside autocast, and so must be those of a reference that agrees with them.
    start = files.hugging_face_directory(source, output_dir, half if lora else "float32")
    return start, files.initial_adapter(lora, args.seed, output_dir) if lora else None


def _run(
    stage: str,
    arguments: dict[str, Any],
    adapter: Path | None,
    record: Record,
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
    with _replaced(home, name, trainer_class), _replaced(workflow, "get_dataset", lambda *_, **__: data):
        function(model_args, data_args, training_args, finetuning_args, *further, callbacks=[record])


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
    return {
        "backend": "LLaMA-Factory",
        "base model": base,
        "rows": len(train_rows),
        "tokens": train_rows.num_tokens,
        "total_steps": schedule.total_steps,
        "global_batch_size": schedule.global_batch_size,
        "lr_scheduler_type": args.lr_scheduler_type.value,
        "warmup_steps": args.get_warmup_steps(schedule.total_steps),
        **{name: getattr(args, name) for name in names},
        **{name: value for name, value in vars(finetuning_args).items() if not name.startswith("pref")},
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
        "report_to": list(args.report_to) or "none",
        "disable_tqdm": True,
    }
