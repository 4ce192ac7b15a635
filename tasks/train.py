"""Stage *train*: torchrun on Megatron-Core."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from tasks.section import Execution, Section


class TrainingConfig(Section):
    """What is trained, and how. Fields of transformers' TrainingArguments keep their names."""

    stage: Literal["pt", "sft", "dpo"] = "sft"
    """Pretraining, supervised fine-tuning, or preference optimization."""
    use_mca: bool = True
    """Megatron-Core; false falls back to LLaMA-Factory's trainers."""
    finetuning_type: Literal["full", "lora"] = "full"
    global_batch_size: PositiveInt = 8
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: Execution[PositiveInt] = 1
    """Sequences per forward pass of one data-parallel rank."""
    num_train_epochs: float = Field(default=1.0, gt=0)
    max_steps: int = Field(default=-1, ge=-1)
    """Optimizer steps; -1 derives them from `num_train_epochs`."""
    learning_rate: float = Field(default=1e-5, gt=0, le=1.0)
    min_learning_rate: float = Field(default=0.0, ge=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    """Share of the steps over which the learning rate rises from 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-8, gt=0)
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradient clipping threshold; 0 turns clipping off."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 keeps fp32 master weights and reduces gradients in fp32."""
    seed: int = Field(default=42, ge=0, lt=2**31)
    """Seed of the order of the data and of dropout."""
    use_distributed_optimizer: Execution[bool] = True
    recompute_granularity: Execution[Literal["none", "selective", "full"]] = "none"
    """Activation recomputation."""
    logging_steps: Execution[PositiveInt] = 1
    save_steps: Execution[NonNegativeInt] = 100
    """A checkpoint to resume from every this many steps; 0 for none but on SIGTERM."""
    save_total_limit: Execution[PositiveInt] = 2


class ParallelConfig(Section):
    """The parallel layout. It decides speed and memory, never the result: all of it is execution."""

    tensor: Execution[PositiveInt] = 1
    pipeline: Execution[PositiveInt] = 1
    virtual_pipeline: Execution[PositiveInt | None] = None
    """Model chunks per pipeline rank (interleaved schedule)."""
    context: Execution[PositiveInt] = 1
    expert: Execution[PositiveInt] = 1
    sequence_parallel: Execution[bool] = False


class LauncherConfig(Section):
    """How the ranks are started; execution throughout."""

    nproc_per_node: Execution[PositiveInt] = 1
    """Ranks on this machine; data parallelism is what TP × PP × CP leaves of them."""
    omp_num_threads: Execution[PositiveInt] = 1
    max_restarts: Execution[NonNegativeInt] = 0


class LoraConfig(Section):
    """LoRA, used when `training.finetuning_type` is `lora`."""

    r: PositiveInt = 8
    alpha: PositiveInt = 16
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: list[str] = Field(default_factory=lambda: ["all-linear"])


class DpoConfig(Section):
    """Preference optimization, used when `training.stage` is `dpo`."""

    pref_loss: Literal["sigmoid", "hinge", "ipo", "orpo", "simpo"] = "sigmoid"
    pref_beta: float = Field(default=0.1, gt=0)
    pref_ftx: float = Field(default=0.0, ge=0)
    use_ref_model: bool = True
