"""Which held-out rows each step of an evaluation takes, and the sum of its steps. The steps never change in a run."""

import math
from collections.abc import Iterator, Sequence

from mca_lib.trainers.engine import StepMetrics
from mca_lib.trainers.schedule import BatchShape
from mca_lib.trainers.training_args import TrainingArguments


def evaluation_shape(args: TrainingArguments, training: BatchShape) -> BatchShape:
    """As many micro batches on each rank as the pipeline's schedule wants, of `per_device_eval_batch_size` rows."""
    micro, replicas = args.per_device_eval_batch_size, training.data_parallel_size
    return BatchShape(
        global_batch_size=micro * replicas * training.micro_batch_multiple,
        micro_batch_size=micro,
        data_parallel_size=replicas,
        micro_batch_multiple=training.micro_batch_multiple,
    )


def evaluation_rows(num_rows: int, shape: BatchShape) -> Iterator[range]:
    """Every row once, step by step."""
    for start in range(0, num_rows, shape.global_batch_size):
        yield range(start, min(start + shape.global_batch_size, num_rows))


def total(steps: Sequence[StepMetrics]) -> StepMetrics:
    """Sums over all steps."""
    return StepMetrics(
        sums={name: sum(step.sums[name] for step in steps) for name in steps[0].sums},
        count=sum(step.count for step in steps),
        loss_tokens=sum(step.loss_tokens for step in steps),
        tokens=sum(step.tokens for step in steps),
        grad_norm=math.nan,
    )
