"""Megatron-Core's engine around a model: gradient buffers, optimizer, pipeline schedule, learning rate.

One object per rank. It knows tensors and process groups; rows, files and logs are the trainer's business.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule

from mca_lib.errors import ConfigError
from mca_lib.models.freeze import freeze_weights
from mca_lib.parallel import pipeline_communication
from mca_lib.platforms import current_platform
from mca_lib.trainers.batches import MicroBatch
from mca_lib.trainers.experts import Experts
from mca_lib.trainers.gradients import set_overlap, wrap
from mca_lib.trainers.loss import Objective, SummedLoss, TokenObjective
from mca_lib.trainers.optimizer import MIN_LOSS_SCALE, make_optimizer, make_scheduler
from mca_lib.trainers.training_args import TrainingArguments


@dataclass(frozen=True)
class StepMetrics:
    """What one step did, the same on every rank."""

    sums: dict[str, float]
    """`loss` and the objective's measures, each summed over what is counted."""
    count: int
    """What is counted: tokens with loss, or pairs."""
    loss_tokens: int
    tokens: int
    """Tokens that went through the model, padding excluded."""
    grad_norm: float
    """Before clipping; nan for an evaluation, inf where fp16 gradients overflowed."""
    updated: bool = True
    """False where fp16 gradients overflowed: the weights are as before, and the loss scale is lower."""

    @property
    def means(self) -> dict[str, float]:
        """`loss` and the measures, per token with loss or per pair; nan when there is none."""
        return {name: total / self.count if self.count else math.nan for name, total in self.sums.items()}

    @property
    def loss(self) -> float:
        return self.means["loss"]


class Engine:
    """Wraps the chunks of one rank for training.

    Args:
        chunks: the rank's model chunks, one per virtual pipeline stage.
        args: training arguments.
        total_steps: where the learning rate schedule ends.
        objective: what is minimized.
    """

    def __init__(
        self, chunks: Sequence[MegatronModule], args: TrainingArguments, total_steps: int, objective: Objective
    ) -> None:
        self.args, self.objective = args, objective
        self.bare_chunks = list(chunks)
        self.device = current_platform().device
        if self.bare_chunks[0].adapters is not None:
            args.check_with_adapters()
        elif args.freeze:
            self._freeze()
        config = self.bare_chunks[0].config
        # Gradients are summed over replicas and divided once by the tokens of the step; DDP reads this when built.
        config.calculate_per_token_loss = True
        for name, value in pipeline_communication(args).items():
            setattr(config, name, value)
        self.chunks = [wrap(chunk.to(self.device), args, i) for i, chunk in enumerate(self.bare_chunks)]
        self.optimizer = make_optimizer(args, self.chunks)
        self.scheduler = make_scheduler(args, self.optimizer, total_steps)
        self.skipped_steps = 0
        """Steps of the run without an update, which the schedule does not count."""
        self._gathers_late, self._is_stale = args.overlap_param_gather, False
        if args.overlap_grad_reduce:
            set_overlap(config, self.chunks)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        self._experts = Experts(self.bare_chunks, args)
        config.moe_grad_scale_func = lambda: self.optimizer.scale_loss(self._experts.loss_weight)
        self._run = get_forward_backward_func()

    def train_step(self, batches: Sequence[MicroBatch]) -> StepMetrics:
        """Forward, backward, clip, update. All ranks take part, with as many micro batches each.

        A step whose fp16 gradients overflow updates nothing, and the learning rate stays where it is.

        Raises:
            ConfigError: the loss scale of fp16 is at its minimum.
        """
        reports = self._gradients(batches)
        updated, grad_norm, _ = self.optimizer.step()
        if not updated:
            self._skip()
            return replace(self._metrics(reports, batches, math.inf), updated=False)
        self.scheduler.step(increment=1)
        self._is_stale = self._gathers_late
        return self._metrics(reports, batches, float(grad_norm))

    def try_step(self, batches: Sequence[MicroBatch]) -> tuple[float, bool]:
        """Forward and backward without an update: the loss, and whether it and the gradients are finite on all ranks.

        In fp16 the loss alone: gradients overflow until the scale has come down.
        """
        metrics = self._metrics(self._gradients(batches), batches, math.nan)
        trained = (p.main_grad for chunk in self.chunks for p in chunk.parameters() if p.requires_grad)
        overflows = not self.args.fp16 and any(not gradient.isfinite().all() for gradient in trained)
        return metrics.loss, not self.any_rank(overflows or not math.isfinite(metrics.sums["loss"]))

    @torch.no_grad()
    def evaluate_step(self, batches: Sequence[MicroBatch]) -> StepMetrics:
        """Forward only."""
        return self._metrics(self.reports(batches, self.objective), batches, math.nan)

    @torch.no_grad()
    def reports(self, batches: Sequence[MicroBatch], objective: Objective) -> list[dict[str, torch.Tensor]]:
        """Forward only: what the objective reports of each micro batch; nothing but on the last pipeline stage."""
        self.gather_weights()
        for chunk in self.chunks:
            chunk.eval()
        return self._forward_backward(batches, objective, forward_only=True)

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Bring every rank's weights up to date, before they are read elsewhere than in a training step.

        With `overlap_param_gather` a rank has but its own share of the last update until the next forward pass.
        """
        if self._is_stale:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        self._is_stale = False

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of the last pipeline stages' values over replicas and context parallel ranks, on every rank. In place."""
        dist.all_reduce(values, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(values, src=last, group=parallel_state.get_pipeline_model_parallel_group())
        return values

    def expert_measures(self) -> dict[str, float]:
        """How evenly the experts were loaded since the last call, the same on every rank; see `Experts.measures`."""
        return self._experts.measures()

    def scaling_measures(self) -> dict[str, float]:
        """The loss scale, and how many steps were skipped because it was too high; empty but in fp16."""
        if not self.args.fp16:
            return {}
        return {"loss_scale": float(self.optimizer.get_loss_scale()), "skipped_steps": self.skipped_steps}

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return self.optimizer.param_groups[0]["lr"]

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on some rank; the same answer everywhere."""
        raised = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(raised, op=dist.ReduceOp.MAX)
        return bool(raised)

    def _freeze(self) -> None:
        """Megatron's optimizer and pipeline want something to train in every chunk. All ranks say so together."""
        if self.any_rank(not freeze_weights(self.bare_chunks, self.args.freeze)):
            raise ConfigError(
                "freeze: a pipeline stage would have nothing to train; freeze less, or use another "
                "pipeline_model_parallel_layout"
            )

    def _gradients(self, batches: Sequence[MicroBatch]) -> list[dict[str, torch.Tensor]]:
        """What the objective reports; the gradients of the step are in the buffers then."""
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._experts.begin_step(batches)
        return self._forward_backward(batches, self.objective, forward_only=False)

    def _skip(self) -> None:
        self.skipped_steps += 1
        scale = float(self.optimizer.get_loss_scale())
        if scale <= MIN_LOSS_SCALE:
            raise ConfigError(
                f"training diverged: the loss scale of fp16 fell to its minimum {scale:g}, so gradients overflow "
                f"at any scale; use bf16, or lower learning_rate={self.args.learning_rate}"
            )

    def _forward_backward(
        self, batches: Sequence[MicroBatch], objective: Objective, *, forward_only: bool
    ) -> list[dict[str, torch.Tensor]]:
        several = len(self.chunks) > 1
        return self._run(
            forward_step_func=partial(_forward_step, objective=objective),
            data_iterator=[iter(batches) for _ in self.chunks] if several else iter(batches),
            model=self.chunks if several else self.chunks[0],
            num_microbatches=len(batches),
            # Over all context and tensor parallel ranks; only pipelines read it, and there all lengths are equal.
            seq_length=batches[0].input_ids_1S.shape[1] * self.args.context_parallel_size,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _metrics(
        self, reports: list[dict[str, torch.Tensor]], batches: Sequence[MicroBatch], grad_norm: float
    ) -> StepMetrics:
        names = ("loss_sum", *self.objective.measures, "count")
        totals = torch.zeros(len(names) + 2, dtype=torch.float64, device=self.device)
        for report in reports:  # empty but on the last stage
            totals[:-2] += torch.stack([report[name] for name in names])
        totals[-2] = sum(batch.loss_mask_1S.sum() for batch in batches)
        if parallel_state.get_context_parallel_rank() == 0:
            totals[-1] = sum(batch.num_tokens for batch in batches)
        *sums, count, loss_tokens, tokens = self.total(totals).tolist()
        named = dict(zip(("loss", *self.objective.measures), sums, strict=True))
        return StepMetrics(named, int(count), int(loss_tokens), int(tokens), grad_norm)


def _forward_step(
    batches: Iterator[MicroBatch], model: torch.nn.Module, *, objective: Objective
) -> tuple[torch.Tensor, partial[SummedLoss]]:
    """One micro batch through one chunk, for Megatron's schedule: its output, and what makes a loss of it."""
    batch = next(batches)
    output = model(
        batch.input_ids_1S,
        batch.positions,
        None,
        labels=batch.labels_1S,
        # Turns on the loss of multi-token prediction, which is one per token.
        loss_mask=batch.loss_mask_1S if isinstance(objective, TokenObjective) else None,
        packed_seq_params=batch.packed,
        padding_mask=batch.rows_1S,  # read by routers alone
        **batch.model_arguments,
    )
    return output, partial(objective, batch=batch)
