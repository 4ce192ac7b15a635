"""Megatron's optimizer and learning rate schedule, as the training arguments ask for them."""

import math
from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mca_lib.trainers.training_args import TrainingArguments

INITIAL_LOSS_SCALE, MIN_LOSS_SCALE = 2.0**10, 2.0**-16
"""Of a loss that is summed over tokens; of a mean over N tokens they would be N times as large, as Megatron's are."""


def make_optimizer(args: TrainingArguments, chunks: Sequence[DistributedDataParallel]) -> MegatronOptimizer:
    """AdamW over the trainable weights of this rank's chunks."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.learning_rate,
        min_lr=args.min_learning_rate,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_epsilon,
        # Megatron computes the norm only when it clips; an infinite threshold measures without clipping.
        clip_grad=args.max_grad_norm or math.inf,
        bf16=args.bf16,
        fp16=args.fp16,
        initial_loss_scale=INITIAL_LOSS_SCALE,
        min_loss_scale=MIN_LOSS_SCALE,
        params_dtype=args.params_dtype,
        use_distributed_optimizer=args.use_distributed_optimizer,
        optimizer_cpu_offload=args.optimizer_offload_fraction > 0,
        optimizer_offload_fraction=args.optimizer_offload_fraction,
        overlap_param_gather=args.overlap_param_gather,
    )
    return get_megatron_optimizer(config, list(chunks))


def optimizer_parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Megatron has a second one for experts that are spread over ranks; one without weights has `optimizer` None."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def allocate_moments(optimizer: MegatronOptimizer) -> None:
    """Moments of 0 for all weights that have none, as before the first update."""
    for part in optimizer_parts(optimizer):
        if part.init_state_fn is not None and part.optimizer is not None:
            part.init_state_fn(part.optimizer, part.config)


def make_scheduler(args: TrainingArguments, optimizer: MegatronOptimizer, total_steps: int) -> OptimizerParamScheduler:
    """Step t trains with the rate of transformers' schedule at t: 0 at the start of a warm-up.

    That of warmup_stable_decay starts at `min_learning_rate`, as transformers' does.
    """
    warmup = min(args.get_warmup_steps(total_steps), total_steps - 1)
    floor = min(args.min_learning_rate, args.learning_rate)
    decays_at_the_end = args.megatron_schedule == "WSD"
    return OptimizerParamScheduler(
        optimizer,
        init_lr=floor if decays_at_the_end else 0.0,
        max_lr=args.learning_rate,
        min_lr=floor,
        lr_warmup_steps=warmup,
        lr_decay_steps=total_steps,
        lr_decay_style=args.megatron_schedule,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
        # Rounding up both shares of a short run must not let the warm-up end in the decay.
        wsd_decay_steps=min(math.ceil(args.decay_ratio * total_steps), total_steps - warmup),
        lr_wsd_decay_style=args.decay_style,
    )
