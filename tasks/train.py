"""Stage *train*: torchrun on Megatron-Core.

identity    the training section; LoRA's or DPO's section where it is used
inputs      the converted checkpoint; the train split of the data set
execution   the parallel layout, the launcher, micro batch, checkpoint and log cadence
body        torchrun of `mca_lib.run_train`, resuming from the checkpoints in the work folder; then the job `digest`
            over the trained checkpoint
output      an MCA checkpoint; with LoRA the adapter alone, as a PEFT directory
"""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from mca_lib import errors
from mca_lib.adapters.targets import target_names
from mca_lib.errors import ConfigError, UserError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.layout import model_ranks, rank_problems, size_problems
from mca_lib.models.layout_rules import check_training_layout
from mca_lib.rank_process import ERRORS_VARIABLE, first_failure
from tasks.canonical import JSON
from tasks.contract import Input, Produced, Stage, StageContext
from tasks.errors import StageFailed
from tasks.links import link_tree
from tasks.process import CommandFailed, redact
from tasks.section import Execution, Section
from tasks.store import Artifact

RESULT_NAME = "train_result.json"
# fp32 weights and two Adam moments for each weight of 2 bytes, and the weights themselves.
CHECKPOINT_PER_WEIGHT_BYTE = 7
TRACEBACK_LINES = 25


class TrainingConfig(Section):
    """What is trained, and how. Fields of transformers' TrainingArguments keep their names."""

    stage: Literal["pt", "sft", "dpo"] = "sft"
    """Pretraining, supervised fine-tuning, or preference optimization."""
    use_mca: bool = True
    """Megatron-Core; false falls back to LLaMA-Factory's trainers."""
    finetuning_type: Literal["full", "lora"] = "full"
    """All weights, or adapters beside frozen weights (section `lora`)."""
    global_batch_size: PositiveInt = 8
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: Execution[PositiveInt] = 1
    """Sequences per forward pass of one data-parallel rank."""
    num_train_epochs: float = Field(default=1.0, gt=0, le=1e6)
    """Passes over the training split, where `max_steps` is -1."""
    max_steps: int = Field(default=-1, ge=-1, le=10**9)
    """Optimizer steps; -1 derives them from `num_train_epochs`."""
    learning_rate: float = Field(default=1e-5, gt=0, le=1.0)
    """After the warm-up."""
    min_learning_rate: float = Field(default=0.0, ge=0)
    """What a linear or cosine schedule ends at."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "cosine"
    """Course of the learning rate after the warm-up."""
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    """Share of the steps over which the learning rate rises from 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's, decoupled from the gradient."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of Adam's mean of the gradient."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of Adam's mean of the squared gradient."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """Added to the denominator of Adam's update."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradient clipping threshold; 0 turns clipping off."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 keeps fp32 master weights and reduces gradients in fp32."""
    seed: int = Field(default=42, ge=0, lt=2**31)
    """Seed of the order of the data and of dropout."""
    use_distributed_optimizer: Execution[bool] = True
    """Data-parallel replicas share the optimizer state."""
    recompute_granularity: Execution[Literal["none", "selective", "full"]] = "none"
    """Activations to compute twice instead of keeping: none, those of core attention, or all of each layer."""
    logging_steps: Execution[PositiveInt] = 1
    """Steps between two lines of the log."""
    save_steps: Execution[NonNegativeInt] = 100
    """A checkpoint to resume from every this many steps; 0 for none but on SIGTERM."""
    save_total_limit: Execution[PositiveInt] = 2
    """Checkpoints to resume from that are kept, the newest ones."""


class ParallelConfig(Section):
    """The parallel layout, all of it execution: it decides speed and memory; the result changes by rounding alone."""

    tensor: Execution[PositiveInt] = 1
    """Ranks that share each weight matrix."""
    pipeline: Execution[PositiveInt] = 1
    """Ranks that share the stack of layers."""
    virtual_pipeline: Execution[PositiveInt | None] = None
    """Model chunks per pipeline rank (interleaved schedule)."""
    context: Execution[PositiveInt] = 1
    """Ranks that share each sequence."""
    expert: Execution[PositiveInt] = 1
    """Ranks that share the experts of a layer."""
    expert_tensor: Execution[PositiveInt | None] = None
    """Ranks that share each expert; by default as many as share the other weights."""
    sequence_parallel: Execution[bool] = False
    """Split the activations between tensor parallel regions too; models with experts need it to train with `tensor`."""
    first_stage_layers: Execution[PositiveInt | None] = None
    """Layers of the first pipeline rank, where it is not to have an equal share."""
    last_stage_layers: Execution[PositiveInt | None] = None
    """Layers of the last pipeline rank, where it is not to have an equal share."""
    pipeline_layout: Execution[str | None] = None
    """What each pipeline stage holds, in Megatron's notation: `Et*3|t*4L`."""


class LauncherConfig(Section):
    """How the ranks are started; execution throughout."""

    nproc_per_node: Execution[int] = Field(default=1, ge=1, le=1024)
    """Ranks on this machine; data parallelism is what TP × PP × CP leaves of them."""
    omp_num_threads: Execution[PositiveInt] = 1
    """CPU threads of each rank."""
    max_restarts: Execution[NonNegativeInt] = 0
    """How often torchrun starts all ranks again after a failure."""


class LoraConfig(Section):
    """LoRA, used when `training.finetuning_type` is `lora`; fields as those of PEFT."""

    r: PositiveInt = 8
    """Rank of the adapters."""
    alpha: PositiveInt = 16
    """Adapters are scaled by alpha / r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the adapters' inputs that is dropped in training."""
    use_rslora: bool = False
    """Scale by alpha / √r in place of alpha / r."""
    target_modules: list[str] = Field(default_factory=lambda: ["all-linear"], min_length=1)
    """Ends of the names of Hugging Face modules, as `q_proj`; `all-linear` is every linear layer but the output layer
    and the gates."""


class DpoConfig(Section):
    """Preference optimization, used when `training.stage` is `dpo`."""

    pref_loss: Literal["sigmoid", "hinge", "ipo", "orpo", "simpo"] = "sigmoid"
    """sigmoid, hinge and ipo compare with the model as it was before training; orpo and simpo do without."""
    pref_beta: float = Field(default=0.1, gt=0)
    """How much a difference in log-probability counts; of ipo the smaller, the further apart; of orpo the weight."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that chosen and rejected are the wrong way round; sigmoid only."""
    simpo_gamma: float = Field(default=0.5, ge=0)
    """By how much the rewards of chosen and rejected are to differ; simpo only."""
    pref_ftx: float = Field(default=0.0, ge=0)
    """Weight of an added supervised loss: minus the mean log-probability of the chosen answer's tokens."""
    use_ref_model: Execution[bool | None] = None
    """May say what `pref_loss` implies, nothing else; so it is part of no key."""


@dataclass(frozen=True)
class TrainStage(Stage):
    """Train `checkpoint` (of stage convert) on the train split of `dataset`."""

    checkpoint: Artifact
    dataset: Artifact
    training: TrainingConfig
    parallel: ParallelConfig
    launcher: LauncherConfig
    lora: LoraConfig
    dpo: DpoConfig

    name: ClassVar[str] = "train"
    version: ClassVar[int] = 1

    def identity(self) -> dict[str, JSON]:
        used = {
            "lora": self.lora if self.training.finetuning_type == "lora" else None,
            "dpo": self.dpo if self.training.stage == "dpo" else None,
        }
        return self.training.identity() | {name: config.identity() for name, config in used.items() if config}

    def inputs(self) -> dict[str, Input]:
        return {"checkpoint": Input.of(self.checkpoint), "dataset": Input.of(self.dataset, "train")}

    @property
    def _trains_adapters(self) -> bool:
        return self.training.finetuning_type == "lora"

    def space_needed(self) -> int:
        if self._trains_adapters:
            return super().space_needed()  # the model itself is not written
        weights = sum(path.stat().st_size for path in (self.checkpoint.path / "model").rglob("*") if path.is_file())
        checkpoints = self.training.save_total_limit + 1 if self.training.save_steps else 1
        return super().space_needed() + weights * (1 + CHECKPOINT_PER_WEIGHT_BYTE * checkpoints)

    def produce(self, ctx: StageContext) -> Produced:
        problems = training_problems(self.training, self.parallel, self.launcher)
        for problem in (*problems, *preference_problems(self.training, self.dpo)):
            raise ConfigError(problem)
        config = McaModelConfig.from_pretrained(self.checkpoint.path)
        check_training_layout(config, self.parallel)
        if self._trains_adapters:
            target_names(config, self.lora.target_modules)
        final, result = ctx.work / "final", ctx.work / RESULT_NAME
        # The result is written last: with both, an earlier attempt had come to its end.
        if not (final.is_dir() and result.is_file()):
            self._launch(ctx, final)
        stats = json.loads(result.read_text())
        link_tree(final, ctx.staging)
        if self._trains_adapters:
            return Produced(digest=None, stats=stats)
        # Its progress would stand where the training's does.
        digest = ctx.run_job("digest", {"checkpoint": str(ctx.staging)}, on_progress=None)
        return Produced(digest=digest["digest"], parts=digest["parts"], stats=stats)

    def _launch(self, ctx: StageContext, final: Path) -> None:
        """Run all ranks to their end. Raises the user's error of the first rank that failed, or StageFailed."""
        arguments, failures = ctx.work / "arguments.json", ctx.work / "failures"
        arguments.write_text(json.dumps(self._arguments(ctx.work, final), indent=1))
        shutil.rmtree(failures, ignore_errors=True)
        failures.mkdir()
        command = [
            *(sys.executable, "-m", "mca_lib.launch", "--nnodes=1"),
            f"--nproc-per-node={self.launcher.nproc_per_node}",
            f"--max-restarts={self.launcher.max_restarts}",
            # A free port. mca_lib.launch is torchrun, listening on this machine only.
            *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
            *("-m", "mca_lib.run_train", str(arguments)),
        ]
        env = {"OMP_NUM_THREADS": str(self.launcher.omp_num_threads), ERRORS_VARIABLE: str(failures)}
        try:
            ctx.run_command(command, log_name="train", env=env)
        except CommandFailed as error:
            failure = first_failure(failures)
            if failure is None:
                raise
            raise _as_exception(failure, error.log_path) from None

    def _arguments(self, work: Path, final: Path) -> dict[str, Any]:
        """What `mca_lib.run_train` reads."""
        training, parallel = self.training, self.parallel
        return {
            "model_name_or_path": str(self.checkpoint.path),
            "weights_digest": self.checkpoint.parts.get("weights"),
            "token_store": str(self.dataset.path),
            "output_dir": str(work),
            "final_dir": str(final),
            "stage": training.stage,
            "finetuning_type": training.finetuning_type,
            "lora_rank": self.lora.r,
            "lora_alpha": self.lora.alpha,
            "lora_dropout": self.lora.dropout,
            "use_rslora": self.lora.use_rslora,
            "lora_target": ",".join(self.lora.target_modules),
            "pref_loss": self.dpo.pref_loss,
            "pref_beta": self.dpo.pref_beta,
            "dpo_label_smoothing": self.dpo.label_smoothing,
            "simpo_gamma": self.dpo.simpo_gamma,
            "pref_ftx": self.dpo.pref_ftx,
            "use_mca": training.use_mca,
            "tensor_model_parallel_size": parallel.tensor,
            "pipeline_model_parallel_size": parallel.pipeline,
            "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline,
            "context_parallel_size": parallel.context,
            "expert_model_parallel_size": parallel.expert,
            "expert_tensor_parallel_size": parallel.expert_tensor,
            "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
            "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
            "pipeline_model_parallel_layout": parallel.pipeline_layout,
            "sequence_parallel": parallel.sequence_parallel,
            "global_batch_size": training.global_batch_size,
            "per_device_train_batch_size": training.micro_batch_size,
            "num_train_epochs": training.num_train_epochs,
            "max_steps": training.max_steps,
            "learning_rate": training.learning_rate,
            "min_learning_rate": training.min_learning_rate,
            "lr_scheduler_type": training.lr_scheduler_type,
            # transformers reads a number below 1 as a share of the steps.
            "warmup_steps": training.warmup_ratio,
            "weight_decay": training.weight_decay,
            "adam_beta1": training.adam_beta1,
            "adam_beta2": training.adam_beta2,
            "adam_epsilon": training.adam_epsilon,
            "max_grad_norm": training.max_grad_norm,
            "bf16": training.precision == "bf16",
            "seed": training.seed,
            "use_distributed_optimizer": training.use_distributed_optimizer,
            "recompute_granularity": training.recompute_granularity,
            "logging_steps": training.logging_steps,
            "save_strategy": "steps" if training.save_steps else "no",
            "save_steps": training.save_steps or 1,
            "save_total_limit": training.save_total_limit,
        }


def training_problems(training: TrainingConfig, parallel: ParallelConfig, launcher: LauncherConfig) -> Iterator[str]:
    """What these sections ask for and this release cannot do, and numbers that do not divide: `field: reason`."""
    if not training.use_mca:
        yield "training.use_mca: the LLaMA-Factory backend is not available in this release; use true"
    ranks, problems = launcher.nproc_per_node, [*size_problems(parallel)]
    problems = problems or [f"launcher.nproc_per_node: {problem}" for problem in rank_problems(parallel, ranks)]
    if problems:
        yield from problems
        return
    replicas = ranks // model_ranks(parallel)
    rows = training.micro_batch_size * replicas
    if training.global_batch_size % rows:
        yield (
            f"training.global_batch_size: {training.global_batch_size} is not a multiple of training.micro_batch_size "
            f"× data parallel size = {training.micro_batch_size} × {replicas} = {rows}"
        )


def preference_problems(training: TrainingConfig, dpo: DpoConfig) -> Iterator[str]:
    """Fields of the section `dpo` that do not go together: `field: reason`."""
    if training.stage != "dpo":
        return
    has_reference = dpo.pref_loss not in ("orpo", "simpo")
    if dpo.use_ref_model not in (None, has_reference):
        has = "needs a" if has_reference else "has no"
        yield f"dpo.use_ref_model: dpo.pref_loss {dpo.pref_loss} {has} reference model; leave it out"
    for name, loss in (("label_smoothing", "sigmoid"), ("simpo_gamma", "simpo")):
        if dpo.pref_loss != loss and getattr(dpo, name) != DpoConfig.model_fields[name].default:
            yield f"dpo.{name}: has no effect with dpo.pref_loss {dpo.pref_loss}; leave it out, or use {loss}"


def _as_exception(failure: dict[str, Any], log_path: Path) -> Exception:
    """The failure of a rank as this process raises it: one line for a user's mistake, a traceback for a defect."""
    message = redact(failure["message"])
    if failure["kind"] == "user":
        kind = getattr(errors, failure["type"], UserError)
        return kind(message) if issubclass(kind, UserError) else UserError(message)
    trace = "\n".join(redact(failure["traceback"]).splitlines()[-TRACEBACK_LINES:])
    return StageFailed(f"train: rank {failure['rank']}: {failure['type']}: {message}; log: {log_path}\n{trace}")
