"""Gradient buffers around a model chunk, and when replicas exchange what is in them.

With `overlap_grad_reduce` the buffers are split into buckets, each reduced as soon as the backward pass has filled it;
with `overlap_param_gather` updated weights are gathered, bucket by bucket, during the next forward pass. Buckets are
in use where the communication would be waited for: on the first pipeline stage, in its first chunk.
"""

from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from mca_lib.trainers.training_args import TrainingArguments

BUCKET_SIZE: int | None = None
"""Elements of a bucket; None for Megatron's default, 40 million or a million for each replica."""


def wrap(chunk: MegatronModule, args: TrainingArguments, index: int) -> DistributedDataParallel:
    """The chunk, `index` of its rank, with gradient buffers in fp32."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        bucket_size=BUCKET_SIZE,
    )
    inner = Float16Module(chunk.config, chunk) if args.bf16 or args.fp16 else chunk
    return DistributedDataParallel(chunk.config, config, inner, disable_bucketing=index > 0)


def set_overlap(config: TransformerConfig, chunks: Sequence[DistributedDataParallel]) -> None:
    """Tell Megatron's schedules when replicas reduce, and how they start to; as Megatron's own trainer does."""
    config.no_sync_func = [chunk.no_sync for chunk in chunks]
    config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    if len(chunks) == 1:
        (config.no_sync_func,), (config.grad_sync_func,) = config.no_sync_func, config.grad_sync_func
