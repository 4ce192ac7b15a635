"""Saving checkpoints while training goes on.

    begin       all ranks: gather and copy the state of this step              training waits
    write       a thread of each rank: its tensors and random states           training goes on
    complete    all ranks: table of contents, once all have written            a moment
    seal        a thread of rank 0: digests, record, rename, rotation          training goes on

`poll` between two steps takes a save from one stage to the next, when all ranks agree that the stage is done. Threads
touch files alone, never a process group. One save is under way at a time. What is written appears under its name
after its record, so a process that dies at any instant leaves the former checkpoint as the newest.

Plan, format and files are Megatron's (`dist_checkpointing.save(async_sharded_save=True)`). Its own callers fork a
writer, which is no place for a process with threads of gloo and OpenMP and outlives a killed rank, or spawn one, which
needs CUDA (megatron-core 0.19.2).
"""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from mca_lib.checkpoint.collective import from_rank_0, raise_everywhere
from mca_lib.checkpoint.model import translated_failures
from mca_lib.checkpoint.retention import PREFIX, STATE_FOLDER, STATE_NAME, Retention
from mca_lib.checkpoint.sealed import naming, new_staging, seal
from mca_lib.checkpoint.training import TrainerState, rng_name, rng_state, sharded_state, trained_part
from mca_lib.trainers.engine import Engine
from mca_lib.trainers.optimizer import optimizer_parts


@dataclass
class _Save:
    """One save under way, the same on every rank."""

    step: int
    staging: Path
    work: Future
    """Of this rank's thread; other ranks than 0 have nothing to seal."""
    request: AsyncRequest | None
    """Until it is complete."""


class CheckpointSaver:
    """Writes the checkpoints of one run; every method is collective.

    Args:
        output_dir: gets `checkpoint-N/`.
        engine: what is saved.
        keep: which checkpoints stay.
    """

    def __init__(self, output_dir: Path, engine: Engine, keep: Retention) -> None:
        self._output_dir, self._engine, self._keep = output_dir, engine, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._save: _Save | None = None
        self.saved_step: int | None = None
        """Of the newest whole checkpoint that was written here."""

    def begin(self, state: TrainerState, *, going_on: bool) -> None:
        """Start to save, when the former save is whole.

        Args:
            going_on: training changes the tensors before the next `finish`, so they are copied.

        Raises:
            ResourceError, CheckpointError, OSError: the former one could not be written.
        """
        self.finish()
        staging = Path(from_rank_0(lambda: str(_staging(self._output_dir))))
        folder = staging / STATE_FOLDER
        with translated_failures(folder, "written"):
            request = dist_checkpointing.save(
                sharded_state(self._engine, is_loading=False),
                str(folder),
                async_sharded_save=True,
                async_strategy="mcore",
            )
        buckets = _staged(request, set(_live_storages(self._engine)) if going_on else set())
        work = self._thread.submit(_write, staging, request, buckets, rng_state(), state)
        self._save = _Save(state.step, staging, work, request)

    def poll(self) -> None:
        """Go on with the save that is under way, as far as that takes no waiting. Raises as `begin`."""
        while self._save and not self._engine.any_rank(not self._save.work.done()):
            self._advance(self._save)

    def finish(self) -> None:
        """Wait until what is under way is whole. Raises as `begin`."""
        while self._save:
            self._advance(self._save)

    def _advance(self, save: _Save) -> None:
        """From writing to sealing, or from sealing to the end."""
        self._save = None
        try:
            raise_everywhere(save.work.exception())
            if save.request is None:
                self.saved_step = save.step
                return
            _complete(save.request, save.work.result(), save.staging)
        except BaseException:
            if dist.get_rank() == 0:  # on a full disk it would be in the way
                shutil.rmtree(save.staging, ignore_errors=True)
            raise
        sealing = self._thread.submit(self._seal if dist.get_rank() == 0 else _nothing, save.staging, save.step)
        self._save = _Save(save.step, save.staging, sealing, None)

    def _seal(self, staging: Path, step: int) -> None:
        seal(staging, self._output_dir / f"{PREFIX}{step}", {"step": step})
        self._keep.apply(self._output_dir)


def _staging(output_dir: Path) -> Path:
    staging = new_staging(output_dir)
    (staging / STATE_FOLDER).mkdir()
    return staging


def _staged(request: AsyncRequest, live: set[int]) -> list[Any]:
    """Megatron's buckets with tensors in CPU memory, none of which lies in a storage of `live`.

    Megatron has copied those that are views already.
    """
    if request.preload_fn is None:
        return []  # this rank has nothing to write
    return [
        (path, key, (texts, [(item, t.clone() if _storage(t) in live else t) for item, t in tensors]))
        for path, key, (texts, tensors) in request.preload_fn()
    ]


def _live_storages(engine: Engine) -> Iterator[int]:
    """Addresses of all storages that a step changes."""
    for chunk in engine.bare_chunks:
        for tensor in (*trained_part(chunk).parameters(), *trained_part(chunk).buffers()):
            yield _storage(tensor)
    for optimizer in filter(None, (part.optimizer for part in optimizer_parts(engine.optimizer))):
        for group in optimizer.param_groups:
            yield from map(_storage, group["params"])
        for state in optimizer.state.values():
            yield from (_storage(value) for value in state.values() if isinstance(value, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _write(
    staging: Path, request: AsyncRequest, buckets: list[Any], rng: dict[str, Any], state: TrainerState
) -> dict[int, Any]:
    """This rank's files, in its thread. Returns what Megatron wants to know of them."""
    results = {}
    for index, bucket in enumerate(buckets):
        transforms = request.async_fn.args[0]
        with naming(bucket[0]):
            _, results[index] = FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, None, None, True)
            if isinstance(results[index], Exception):
                raise results[index]
    path = staging / rng_name(dist.get_rank())
    with naming(path), path.open("wb") as file:  # given a path, torch would lose the disk's error
        torch.save(rng, file)
    if dist.get_rank() == 0:
        with naming(staging / STATE_NAME):
            (staging / STATE_NAME).write_text(json.dumps(vars(state), indent=1))
    return results


def _complete(request: AsyncRequest, results: dict[int, Any], staging: Path) -> None:
    """Write the table of contents; all ranks."""
    if results:
        request.async_fn_args[2].put(results)
    with translated_failures(staging / STATE_FOLDER, "written"), naming(staging / STATE_FOLDER):
        for finalize in request.finalize_fns:
            finalize()


def _nothing(*_: object) -> None:
    pass
