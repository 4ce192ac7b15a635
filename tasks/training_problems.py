"""What in the sections of a training does not go together, each as `field: reason`; said when the recipe is read."""

from collections.abc import Iterator

from mca_lib.models.layout import model_ranks, rank_problems, size_problems
from tasks.training_config import DpoConfig, LauncherConfig, ParallelConfig, TrainingConfig


def training_problems(training: TrainingConfig, parallel: ParallelConfig, launcher: LauncherConfig) -> Iterator[str]:
    """What these sections ask for and this release cannot do, and numbers that do not divide: `field: reason`."""
    yield from backend_problems(training, parallel)
    yield from option_problems(training)
    ranks, problems = launcher.ranks, [*size_problems(parallel)]
    problems = problems or [f"launcher.nproc_per_node: {problem}" for problem in rank_problems(parallel, ranks)]
    if problems:
        yield from problems
        return
    if training.precision == "fp16" and parallel.expert > 1:
        yield "training.precision: fp16 does not go with parallel.expert above 1; use bf16"
    replicas = ranks // model_ranks(parallel)
    rows = training.micro_batch_size * replicas
    if training.global_batch_size % rows:
        yield (
            f"training.global_batch_size: {training.global_batch_size} is not a multiple of training.micro_batch_size "
            f"× data parallel size = {training.micro_batch_size} × {replicas} = {rows}"
        )


MEGATRON_ALONE = (
    "fp8",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_bias_update_rate",
    "mtp_loss_weight",
    "freeze",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "optimizer_offload_fraction",
    "load_best_model_at_end",
)
"""Fields of `training` that LLaMA-Factory's trainers do not have, beside those that change nothing by default."""


def backend_problems(training: TrainingConfig, parallel: ParallelConfig) -> Iterator[str]:
    """What LLaMA-Factory's trainers cannot do: `field: reason`."""
    if training.use_mca:
        return
    instead = "leave it out, or use training.use_mca true"
    sections = {"training": (training, MEGATRON_ALONE), "parallel": (parallel, tuple(ParallelConfig.model_fields))}
    for section, (config, names) in sections.items():
        for name in names:
            if getattr(config, name) != type(config).model_fields[name].get_default(call_default_factory=True):
                yield f"{section}.{name}: LLaMA-Factory's trainers cannot do this; {instead}"
    if training.recompute_granularity == "selective":
        yield f"training.recompute_granularity: LLaMA-Factory's trainers have none and full; {instead}"


def option_problems(training: TrainingConfig) -> Iterator[str]:
    """Fields of the section `training` that do not go together: `field: reason`."""
    if training.load_best_model_at_end and not training.eval_steps:
        yield "training.load_best_model_at_end: needs evaluations to choose from; set training.eval_steps"
    if training.lr_scheduler_type == "warmup_stable_decay" and training.warmup_ratio + training.decay_ratio > 1:
        yield (
            f"training.decay_ratio: {training.decay_ratio} and training.warmup_ratio {training.warmup_ratio} are more "
            "than all steps; lower one of them"
        )
    if training.fp8 and training.precision != "bf16":
        yield f"training.fp8: needs training.precision bf16, not {training.precision}"
    if training.optimizer_offload_fraction and (training.preflight or training.precision == "fp16"):
        yield (
            "training.optimizer_offload_fraction: Megatron cannot save such an optimizer before its first update; set "
            "training.preflight: false, and use bf16 or fp32"
        )
    if training.finetuning_type == "lora":
        for name in ("freeze", "moe_router_bias_update_rate"):
            if getattr(training, name):
                yield f"training.{name}: has no effect with training.finetuning_type lora; leave it out"
    if training.stage == "dpo":
        for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
            if getattr(training, name):
                yield f"training.{name}: stage dpo has no losses per token; use 0"
    if training.overlap_param_gather:
        for name in ("overlap_grad_reduce", "use_distributed_optimizer"):
            if not getattr(training, name):
                yield f"training.overlap_param_gather: needs training.{name}: true"


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
