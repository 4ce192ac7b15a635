"""Training arguments: transformers' `TrainingArguments`, plus the parallel layout, plus Megatron's own.

Names of transformers are kept, with their meaning: `per_device_train_batch_size` is the micro batch size,
`gradient_accumulation_steps` the number of micro batches. A field of transformers that the Megatron trainer does not
honour is refused when it is set, never ignored: `HONOURED` is the list of those that work.
"""

import os
from dataclasses import dataclass, field, fields

import torch
import transformers
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from mca_lib.errors import ConfigError
from mca_lib.parallel import DistributingParallelArguments
from mca_lib.platforms import current_platform, uses_transformer_engine
from mca_lib.trainers.hybrid_args import HybridArguments
from mca_lib.trainers.ranges import check_ranges
from mca_lib.trainers.schedule import BatchShape, Schedule
from mca_lib.trainers.tracking import check_trackers

# Fields of transformers' TrainingArguments that have their effect here.
# fmt: off
HONOURED = frozenset({
    "output_dir", "do_eval", "seed", "bf16", "fp16", "use_cpu",
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps",
    "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
    "logging_strategy", "logging_steps", "logging_first_step", "report_to", "run_name",
    "save_strategy", "save_steps", "save_total_limit", "eval_strategy", "eval_steps",
    "metric_for_best_model", "greater_is_better", "load_best_model_at_end",
})
# Fields without effect on the result, which callers of transformers set by habit.
HARMLESS = frozenset({
    "do_train", "disable_tqdm", "log_level", "remove_unused_columns",
})
# fmt: on

OFF = (None, False, "no", "")

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "warmup_stable_decay": "WSD",
}
"""transformers' name → decay style of Megatron's scheduler."""


@dataclass
class MegatronArguments(HybridArguments, DistributingParallelArguments):
    """What Megatron-Core adds to transformers' arguments."""

    global_batch_size: int | None = field(
        default=None,
        metadata={"help": "Rows per optimizer step over all ranks; sets gradient_accumulation_steps."},
    )
    use_distributed_optimizer: bool = field(
        default=True, metadata={"help": "Share the optimizer's state between data parallel ranks."}
    )
    recompute_granularity: str = field(
        default="none",
        metadata={"help": "Activations to recompute instead of keeping.", "choices": ["none", "selective", "full"]},
    )
    overlap_grad_reduce: bool = field(
        default=False, metadata={"help": "Reduce gradients between replicas during the backward pass."}
    )
    overlap_param_gather: bool = field(
        default=False, metadata={"help": "Gather updated weights during the next forward pass."}
    )
    optimizer_offload_fraction: float = field(
        default=0.0, metadata={"help": "Share of the optimizer's state that is kept and updated in CPU memory."}
    )
    fp8: str | None = field(default=None, metadata={"help": "hybrid or e4m3: FP8 products, with Transformer Engine."})
    min_learning_rate: float = field(default=0.0, metadata={"help": "Where all but constant schedules end."})
    decay_ratio: float = field(default=0.1, metadata={"help": "Share of the steps in which warmup_stable_decay falls."})
    decay_style: str = field(
        default="linear",
        metadata={"help": "How warmup_stable_decay falls.", "choices": ["linear", "cosine", "minus_sqrt"]},
    )
    moe_aux_loss_coeff: float = field(default=0.0, metadata={"help": "Weight of the loss that balances the experts."})
    moe_z_loss_coeff: float = field(default=0.0, metadata={"help": "Weight of the router's z-loss."})
    moe_router_bias_update_rate: float = field(
        default=0.0, metadata={"help": "Step of the biases that balance the experts, where the router has them."}
    )
    mtp_loss_weight: float = field(default=0.1, metadata={"help": "Weight of the loss of multi-token prediction."})
    freeze: list[str] = field(
        default_factory=list, metadata={"help": "Ends of names of Hugging Face modules that are not trained."}
    )
    freeze_vision_tower: bool = field(default=True, metadata={"help": "Of a model that sees images."})
    freeze_multi_modal_projector: bool = field(default=True, metadata={"help": "Of a model that sees images."})
    freeze_language_model: bool = field(default=False, metadata={"help": "Of a model that sees images."})
    preflight: bool = field(
        default=False, metadata={"help": "Try one step and one checkpoint, and forget them, before training."}
    )
    save_keep_every: int = field(
        default=0, metadata={"help": "Keep checkpoints of multiples of this many steps, beside the newest."}
    )
    async_save: bool = field(default=False, metadata={"help": "Write checkpoints while training goes on."})
    final_dir: str | None = field(
        default=None, metadata={"help": "Gets the trained MCA checkpoint; default: <output_dir>/final."}
    )


@dataclass
class TrainingArguments(MegatronArguments, transformers.TrainingArguments):
    """Arguments of the Megatron trainers. Raises ConfigError for values that it cannot honour."""

    # transformers' 8 would fail, if the memory is for fewer, at the first evaluation.
    per_device_eval_batch_size: int | None = field(
        default=None, metadata={"help": "Rows of an evaluation's micro batch; default: per_device_train_batch_size."}
    )

    def __post_init__(self) -> None:
        self._refuse_ignored_fields()
        check_ranges(self)
        on_cpu = current_platform().device_type == "cpu"
        if self.use_cpu and not on_cpu:
            raise ConfigError("use_cpu=True, but this process sees a CUDA device: hide it with CUDA_VISIBLE_DEVICES=''")
        if self.per_device_eval_batch_size is None:
            self.per_device_eval_batch_size = self.per_device_train_batch_size
        for name in ("logging_steps", "save_steps", "eval_steps"):
            if 0 < (getattr(self, name) or 0) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: use a whole number of steps")
        self.use_cpu = self.use_cpu or on_cpu  # else transformers refuses bf16 without a GPU
        trackers = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or [])
        trackers = [] if trackers == ["none"] else trackers
        check_trackers(trackers)
        self.report_to = []
        # transformers ties it to the checkpoints, which here are others than the weights that are kept.
        best, self.load_best_model_at_end = self.load_best_model_at_end, False
        if best:
            self.metric_for_best_model = self.metric_for_best_model or "loss"
        try:
            super().__post_init__()
        except (ValueError, TypeError) as error:
            raise ConfigError(" ".join(str(error).split())) from None
        self.report_to, self.load_best_model_at_end = trackers, best
        if best and self.eval_strategy is IntervalStrategy.NO:
            raise ConfigError("load_best_model_at_end=True needs evaluations: set eval_strategy to steps or epoch")
        if best and self.metric_for_best_model not in ("loss", "eval_loss"):
            raise ConfigError(f"metric_for_best_model={self.metric_for_best_model!r}: the best model is that of 'loss'")
        if self.lr_scheduler_type.value not in SCHEDULES:
            raise ConfigError(f"lr_scheduler_type={self.lr_scheduler_type.value!r}: use one of {sorted(SCHEDULES)}")
        if self.decay_style not in ("linear", "cosine", "minus_sqrt"):
            raise ConfigError(f"decay_style={self.decay_style!r}: use linear, cosine or minus_sqrt")
        if not 0 < self.decay_ratio <= 1:
            raise ConfigError(f"decay_ratio={self.decay_ratio}: use a share of the steps above 0, at most 1")
        if self.fp16 and self.expert_model_parallel_size > 1:
            # Megatron (0.19.2) has an optimizer for spread experts whose loss scale moves by itself.
            raise ConfigError(
                f"fp16=True with expert_model_parallel_size={self.expert_model_parallel_size}: use bf16, or size 1"
            )
        if self.overlap_param_gather and not (self.overlap_grad_reduce and self.use_distributed_optimizer):
            raise ConfigError("overlap_param_gather=True needs overlap_grad_reduce and use_distributed_optimizer")
        self.check_hybrid()
        self._check_hardware()
        if self.recompute_granularity not in ("none", "selective", "full"):
            raise ConfigError(f"recompute_granularity={self.recompute_granularity!r}: use none, selective or full")
        if self.save_strategy is SaveStrategy.BEST:
            raise ConfigError("save_strategy='best': use no, steps or epoch")
        if self.max_steps == 0 or self.max_steps < -1:
            raise ConfigError(f"max_steps={self.max_steps}: use a positive number, or -1 for num_train_epochs")

    def check_with_adapters(self) -> None:
        """Raises ConfigError for options about the model's own weights, which LoRA leaves as they are."""
        for name in ("freeze", "moe_router_bias_update_rate", "load_checkpoint"):
            if getattr(self, name):
                raise ConfigError(f"{name}={getattr(self, name)!r} has no effect with finetuning_type='lora'")

    def _check_hardware(self) -> None:
        on_cpu = current_platform().device_type == "cpu"
        if not 0 <= self.optimizer_offload_fraction <= 1:
            raise ConfigError(f"optimizer_offload_fraction={self.optimizer_offload_fraction}: use a share from 0 to 1")
        if self.optimizer_offload_fraction and (self.preflight or self.fp16):
            # Its states are made by the first update (0.19.2), which fp16 may skip.
            raise ConfigError(
                "optimizer_offload_fraction: Megatron cannot save such an optimizer before its first update; set "
                "preflight=False, and use bf16 or fp32"
            )
        if self.optimizer_offload_fraction and on_cpu:
            raise ConfigError(
                f"optimizer_offload_fraction={self.optimizer_offload_fraction} moves state from a GPU to CPU memory, "
                "and this process sees no GPU: use 0"
            )
        if self.fp8 is None:
            return
        if self.fp8 not in ("hybrid", "e4m3"):
            raise ConfigError(f"fp8={self.fp8!r}: use hybrid or e4m3")
        if not self.bf16:
            raise ConfigError(f"fp8={self.fp8!r} needs bf16=True: what is no matrix product is computed in bf16")
        if not uses_transformer_engine():
            raise ConfigError(f"fp8={self.fp8!r} needs a GPU and Transformer Engine, which this process does not have")

    @property
    def megatron_schedule(self) -> str:
        """Name of the schedule for Megatron's scheduler."""
        return SCHEDULES[self.lr_scheduler_type.value]

    @property
    def params_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32

    def batch_shape(self, world_size: int) -> BatchShape:
        """How a step is spread over `world_size` ranks. Raises ConfigError when it cannot be."""
        self.check(world_size)
        replicas = self.data_parallel_size(world_size)
        micro = self.per_device_train_batch_size
        interleaved = (self.virtual_pipeline_model_parallel_size or 1) > 1
        return BatchShape(
            global_batch_size=self.global_batch_size or micro * replicas * self.gradient_accumulation_steps,
            micro_batch_size=micro,
            data_parallel_size=replicas,
            micro_batch_multiple=self.pipeline_model_parallel_size if interleaved else 1,
        )

    def schedule(self, num_rows: int, shape: BatchShape) -> Schedule:
        """The steps over a training split of so many rows. Raises DataError when it has none."""
        return Schedule(
            num_rows=num_rows,
            global_batch_size=shape.global_batch_size,
            seed=self.seed,
            num_train_epochs=self.num_train_epochs,
            max_steps=self.max_steps,
        )

    def logs_at(self, step: int, steps_per_epoch: int) -> bool:
        """A line of the log is due after this step."""
        every = max(1, int(self.logging_steps))
        return (self.logging_first_step and step == 1) or _due(self.logging_strategy, every, step, steps_per_epoch)

    @property
    def saves(self) -> bool:
        """Checkpoints are written, of the last step too."""
        return self.save_strategy != SaveStrategy.NO and (
            self.save_strategy != SaveStrategy.STEPS or self.save_steps >= 1
        )

    def saves_at(self, step: int, steps_per_epoch: int) -> bool:
        """A checkpoint is due after this step."""
        return _due(self.save_strategy, self.save_steps, step, steps_per_epoch)

    def evaluates_at(self, step: int, steps_per_epoch: int) -> bool:
        """An evaluation is due after this step."""
        return _due(self.eval_strategy, self.eval_steps or 0, step, steps_per_epoch)

    # transformers derives these by starting accelerate, which would open a process group of its own.

    @property
    def _setup_devices(self) -> torch.device:
        return current_platform().device

    @property
    def n_gpu(self) -> int:
        return int(current_platform().device_type == "cuda")

    @property
    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def process_index(self) -> int:
        return int(os.environ.get("RANK", "0"))

    @property
    def local_process_index(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def _refuse_ignored_fields(self) -> None:
        known = HONOURED | HARMLESS
        for spec in fields(transformers.TrainingArguments):
            if spec.name in known or not spec.init:
                continue
            default = spec.default_factory() if callable(spec.default_factory) else spec.default
            value = getattr(self, spec.name)
            # The parser of flags turns defaults of "no" and "" into False and None.
            if value != default and not (value in OFF and default in OFF):
                raise ConfigError(
                    f"{spec.name}={value!r} has no effect in the Megatron-Core trainer: leave it at {default!r}"
                )


@dataclass
class Seq2SeqTrainingArguments(TrainingArguments):
    """The name under which LLaMA-Factory's interface knows them; nothing is added."""


def _due(strategy: IntervalStrategy | SaveStrategy, every: float, step: int, steps_per_epoch: int) -> bool:
    if strategy in (IntervalStrategy.STEPS, SaveStrategy.STEPS):
        return every >= 1 and step % int(every) == 0
    if strategy in (IntervalStrategy.EPOCH, SaveStrategy.EPOCH):
        return step % steps_per_epoch == 0
    return False
