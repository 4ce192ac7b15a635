"""Preflight: what would fail at some later step fails in the first seconds, and leaves no trace in the run.

    moments of the optimizer → forward and backward pass of the longest rows → a checkpoint → all of it forgotten

Memory is at its largest then, kernels have run, and loss, gradients and the folder have been tried. No optimizer step
is made, so weights, schedule and gradient scaler do not change; random states, buffers (biases that balance experts)
and the optimizer's empty state are put back, and a step zeroes the gradients before it begins. So a run is the same
bit for bit with and without. The scaling histories of Transformer Engine's FP8 are not put back: the first step of an
FP8 training with delayed scaling may round otherwise.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from mca_lib.checkpoint.collective import from_rank_0
from mca_lib.checkpoint.retention import Retention
from mca_lib.checkpoint.saver import CheckpointSaver
from mca_lib.checkpoint.sealed import new_staging
from mca_lib.checkpoint.training import TrainerState, layout, restore_rng, rng_state
from mca_lib.errors import ConfigError, ResourceError, UserError
from mca_lib.platforms import current_platform
from mca_lib.trainers.batches import MicroBatch
from mca_lib.trainers.engine import Engine
from mca_lib.trainers.optimizer import allocate_moments, optimizer_parts


@dataclass(frozen=True)
class Preflight:
    """What it measured."""

    seconds: float
    peak_memory_mb: list[float]
    """By rank: what training is going to need, as far as one can know."""


def preflight(engine: Engine, batches: Sequence[MicroBatch], output_dir: Path) -> Preflight:
    """Try all of it, before a checkpoint is loaded; all ranks take part.

    Args:
        engine: as new, its optimizer without state.
        batches: this rank's longest micro batches, as many as the pipeline holds at a time.
        output_dir: where the run's checkpoints will be.

    Raises:
        ResourceError: memory or disk do not suffice.
        ConfigError: loss or gradient is not finite.
    """
    began = time.monotonic()
    with _named(batches, output_dir), _forgotten(engine):
        allocate_moments(engine.optimizer)
        _check_finite(engine, batches)
        _try_checkpoint(engine, output_dir)
    peaks: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(peaks, round(current_platform().peak_memory_bytes() / 2**20, 1))
    return Preflight(round(time.monotonic() - began, 2), peaks)


def longest(lengths_N: np.ndarray, count: int) -> np.ndarray:
    """Places of the `count` greatest lengths, in no order; of all where they are fewer."""
    count = min(count, len(lengths_N))
    return np.argpartition(lengths_N, -count)[-count:]


def _check_finite(engine: Engine, batches: Sequence[MicroBatch]) -> None:
    loss, finite = engine.try_step(batches)
    if not finite:
        raise ConfigError(
            f"loss {loss:.4g} or a gradient of the longest rows is not finite, before any step: the weights are "
            "damaged, or the precision is too low for them"
        )


def _try_checkpoint(engine: Engine, output_dir: Path) -> None:
    scratch = Path(from_rank_0(lambda: str(new_staging(output_dir))))
    try:
        saver = CheckpointSaver(scratch, engine, Retention())
        saver.begin(TrainerState(0, {}, {}, layout(engine)), going_on=engine.args.async_save)
        saver.finish()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _forgotten(engine: Engine) -> Iterator[None]:
    """Puts back what a pass and a checkpoint change."""
    random_states = rng_state()
    buffers = [(buffer, buffer.clone()) for chunk in engine.bare_chunks for buffer in chunk.buffers()]
    yield
    for part in optimizer_parts(engine.optimizer):
        if part.optimizer is not None:
            part.optimizer.state.clear()
    for buffer, before in buffers:
        buffer.copy_(before)
    engine.expert_measures()  # starts to count anew
    restore_rng(random_states)


@contextlib.contextmanager
def _named(batches: Sequence[MicroBatch], output_dir: Path) -> Iterator[None]:
    """Errors that say that they are the preflight's."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"preflight: {error}") from None
    except OSError as error:
        raise ResourceError(f"preflight: no checkpoint can be written to {output_dir}: {error}") from error
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ResourceError(
            f"preflight: out of memory with the longest rows, {batches[0].num_tokens} tokens in a micro batch: lower "
            "the micro batch size, use recompute_granularity, or spread the model over more ranks"
        ) from error
