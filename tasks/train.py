"""Stage *train*: Megatron-Core on all ranks, or with `training.use_mca: false` LLaMA-Factory's trainers.

identity    the training section; LoRA's or DPO's section where it is used
inputs      the converted checkpoint; the train split of the data set
execution   the parallel layout, the launcher, micro batch, checkpoint and log cadence
body        `mca_lib.run_train` in all ranks (`tasks.launchers`), resuming from the checkpoints in the work folder;
            then the job `digest` over the trained checkpoint
output      an MCA checkpoint; with LoRA the adapter alone, as a PEFT directory
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mca_lib.adapters.targets import target_names
from mca_lib.checkpoint.sealed import RECORD_NAME, find_damage, set_damaged_aside
from mca_lib.errors import ConfigError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.layout_rules import check_training_layout
from mca_lib.models.training_rules import check_adapters_alone, check_training_options
from mca_lib.models.vision.freeze import SWITCHES
from mca_lib.trainers.idle import idle_fields
from mca_lib.trainers.llama_factory import check_model
from mca_lib.trainers.names import RESULT_NAME
from tasks.canonical import JSON
from tasks.contract import Input, Produced, Stage, StageContext
from tasks.launchers import launch
from tasks.links import link_tree
from tasks.runs import keep_run, runs_folder
from tasks.store import Artifact
from tasks.training_config import (
    DpoConfig,
    LauncherConfig,
    LoraConfig,
    ParallelConfig,
    TrainingConfig,
)
from tasks.training_problems import preference_problems, training_problems

# fp32 weights and two Adam moments for each weight of 2 bytes, and the weights themselves.
CHECKPOINT_PER_WEIGHT_BYTE = 7
# In fp32: the model that it starts from, its result, and that as a checkpoint.
COPIES_OF_LLAMA_FACTORY = 6
TRACKER_SECRETS = {
    "wandb": ("WANDB_API_KEY",),
    "mlflow": ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
}
"""Variables of the environment that trackers log in with."""


def tracker_secrets(training: TrainingConfig) -> list[str]:
    """Names of the variables that this training's trackers may log in with."""
    return [name for tracker in training.report_to for name in TRACKER_SECRETS.get(tracker, ())]


def training_space(weights: int, training: TrainingConfig) -> int:
    """Bytes that a training writes, from those of the model's 16-bit weights; an estimate."""
    if training.finetuning_type == "lora":
        return 0  # adapters are small, and the model itself is not written
    checkpoints = training.save_total_limit + 1 if training.save_steps else 1
    best = checkpoints if training.load_best_model_at_end else 0  # each may name another one
    if training.save_keep_every and training.max_steps > 0:
        checkpoints += training.max_steps // training.save_keep_every
    copies = 1 if training.use_mca else COPIES_OF_LLAMA_FACTORY
    return weights * (copies + best + CHECKPOINT_PER_WEIGHT_BYTE * checkpoints)


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
        # Execution otherwise, these decide which model is the best.
        best = {"eval_steps": self.training.eval_steps} if self.training.load_best_model_at_end else {}
        config = McaModelConfig.from_pretrained(self.checkpoint.path)
        mtp_layers = config.mtp_num_layers
        idle = idle_fields(self.training.lr_scheduler_type, self.training.max_steps, mtp_layers)
        if config.vision is None or self._trains_adapters:
            idle |= set(SWITCHES)
        fields = {name: value for name, value in self.training.identity().items() if name not in idle} | best
        return fields | {name: config.identity() for name, config in used.items() if config}

    def inputs(self) -> dict[str, Input]:
        inputs = {"checkpoint": Input.of(self.checkpoint), "dataset": Input.of(self.dataset, "train")}
        if self.training.load_best_model_at_end and "eval" in self.dataset.parts:
            inputs["held out"] = Input.of(self.dataset, "eval")
        return inputs

    @property
    def _trains_adapters(self) -> bool:
        return self.training.finetuning_type == "lora"

    def space_needed(self) -> int:
        weights = sum(path.stat().st_size for path in (self.checkpoint.path / "model").rglob("*") if path.is_file())
        return super().space_needed() + training_space(weights, self.training)

    def produce(self, ctx: StageContext) -> Produced:
        problems = training_problems(self.training, self.parallel, self.launcher)
        for problem in (*problems, *preference_problems(self.training, self.dpo)):
            raise ConfigError(problem)
        config = McaModelConfig.from_pretrained(self.checkpoint.path)
        check_training_layout(config, self.parallel)
        check_training_options(config, self.training)
        if not self.training.use_mca:
            check_model(config, adapters=self._trains_adapters)
        if self._trains_adapters:
            check_adapters_alone(config, self.training)
            target_names(config, self.lora.target_modules)
        final, result = ctx.work / "final", ctx.work / RESULT_NAME
        stats = self._finished(ctx, final, result)
        if stats is None:
            self._launch(ctx, final)
            stats = json.loads(result.read_text())
        if best := stats.get("best"):
            ctx.report.info(f"the result is the model of step {best['step']}, held-out loss {best['loss']:.4f}")
        link_tree(final, ctx.staging)
        (ctx.staging / RECORD_NAME).unlink()  # the artifact has a record of its own
        keep_run(ctx, self.training.save_keep_every)
        if self._trains_adapters:
            return Produced(digest=None, stats=stats)
        # Its progress would stand where the training's does.
        digest = ctx.run_job("digest", {"checkpoint": str(ctx.staging)}, on_progress=None)
        return Produced(digest=digest["digest"], parts=digest["parts"], stats=stats)

    def _finished(self, ctx: StageContext, final: Path, result: Path) -> dict[str, Any] | None:
        """The figures of an earlier attempt that had come to its end; None without one whose result is whole."""
        if not (final.is_dir() and result.is_file()):  # it is written last
            return None
        damage = find_damage(final)
        try:
            stats = json.loads(result.read_text())
        except ValueError:
            stats = None
        if damage is None and isinstance(stats, dict) and "steps" in stats:
            return stats
        reason = damage or f"{result.name} is unreadable"
        ctx.report.warning(f"{final} is not used: {reason}; training goes on from the newest checkpoint")
        result.unlink()
        if damage is not None:
            set_damaged_aside(final)
        return None

    def _launch(self, ctx: StageContext, final: Path) -> None:
        arguments = ctx.work / "arguments.json"
        arguments.write_text(json.dumps(self._arguments(ctx.work, final), indent=1))
        elsewhere = os.environ.get("TENSORBOARD_LOGGING_DIR")
        events = Path(elsewhere) / ctx.work.name if elsewhere else runs_folder(ctx)
        launch(
            ctx,
            self.launcher,
            "mca_lib.run_train",
            arguments,
            env={"TENSORBOARD_LOGGING_DIR": str(events)} if "tensorboard" in self.training.report_to else {},
            secrets=tracker_secrets(self.training),
            log_name="train",
        )

    def _arguments(self, work: Path, final: Path) -> dict[str, Any]:
        """What `mca_lib.run_train` reads."""
        training, parallel = self.training, self.parallel
        return {
            "model_name_or_path": str(self.checkpoint.path),
            "weights_digest": self.checkpoint.parts.get("weights"),
            "token_store": str(self.dataset.path),
            "train_digest": self.dataset.parts.get("train"),
            "eval_digest": self.dataset.parts.get("eval"),
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
            "decay_ratio": training.decay_ratio,
            "decay_style": training.decay_style,
            "bf16": training.precision == "bf16",
            "fp16": training.precision == "fp16",
            "fp8": training.fp8,
            "moe_aux_loss_coeff": training.moe_aux_loss_coeff,
            "moe_z_loss_coeff": training.moe_z_loss_coeff,
            "moe_router_bias_update_rate": training.moe_router_bias_update_rate,
            "mtp_loss_weight": training.mtp_loss_weight,
            "freeze": training.freeze,
            **{name: getattr(training, name) for name in SWITCHES},
            "overlap_grad_reduce": training.overlap_grad_reduce,
            "overlap_param_gather": training.overlap_param_gather,
            "optimizer_offload_fraction": training.optimizer_offload_fraction,
            "report_to": training.report_to,
            "eval_strategy": "steps" if training.eval_steps else "no",
            "eval_steps": training.eval_steps or None,
            "load_best_model_at_end": training.load_best_model_at_end,
            "preflight": training.preflight,
            "save_keep_every": training.save_keep_every,
            "async_save": training.async_save,
            "seed": training.seed,
            "use_distributed_optimizer": training.use_distributed_optimizer,
            "recompute_granularity": training.recompute_granularity,
            "logging_steps": training.logging_steps,
            "save_strategy": "steps" if training.save_steps else "no",
            "save_steps": training.save_steps or 1,
            "save_total_limit": training.save_total_limit,
        }
