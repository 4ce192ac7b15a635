"""Optimizer states of gradient buffers with several buckets, in checkpoints that load at any layout.

Megatron-Core (0.19.2) collects the state of a buffer in a tensor without the padding at the ends of its buckets, and
takes every parameter's part by a place that counts this padding: `fully_reshardable` checkpoints of several buckets
have parameters of the later ones shifted (it warns of "data corruption"). Later releases subtract the padding.
"""

import contextlib
import itertools
from collections.abc import Iterator

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer as Buffer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from mca_lib.trainers.optimizer import optimizer_parts


@contextlib.contextmanager
def places_without_padding(optimizer: MegatronOptimizer) -> Iterator[None]:
    """While it is entered, a buffer says where its parameters lie as if buckets were not padded at their ends."""
    parts = optimizer_parts(optimizer)
    buffers = [buffer for part in parts if isinstance(part, DistributedOptimizer) for buffer in part.buffers]
    places = [buffer.param_index_map for buffer in buffers]
    try:
        for buffer in buffers:
            buffer.param_index_map = _unpadded(buffer)
        yield
    finally:
        for buffer, padded in zip(buffers, places, strict=True):
            buffer.param_index_map = padded


def _unpadded(buffer: Buffer) -> dict:
    starts = itertools.accumulate((bucket.numel_unpadded for bucket in buffer.buckets), initial=0)
    shifts = [bucket.offset - start for bucket, start in zip(buffer.buckets, starts, strict=False)]
    return {
        parameter: (begin - shifts[bucket], end - shifts[bucket], bucket)
        for parameter, (begin, end, bucket) in buffer.param_index_map.items()
    }
