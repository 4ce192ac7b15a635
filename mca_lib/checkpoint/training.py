"""Checkpoints to resume training from: `checkpoint-N/` in the output directory.

    checkpoint-N/state/          torch_dist: what is trained and its optimizer, loads at any parallel layout
    checkpoint-N/rng_R.pt        random states of rank R; used at the same layout only
    checkpoint-N/trainer.json    step, counters, the best evaluation, and what the run was about
    checkpoint-N/.record.json    written last (see `sealed`)

What is trained is the model, or with LoRA the adapters alone: the model that they are for comes from where the run
found it, and its digest is a part of what the run is about.

At the same layout a resumed run continues bit for bit. At another one it continues from the same weights, moments
and rows, with reseeded random states.
"""

import json
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from mca_lib.checkpoint.buckets import places_without_padding
from mca_lib.checkpoint.collective import from_rank_0
from mca_lib.checkpoint.model import translated_failures
from mca_lib.checkpoint.parameter_groups import with_own_groups
from mca_lib.checkpoint.retention import BEST_PREFIX, PREFIX, STATE_FOLDER, STATE_NAME, numbered
from mca_lib.checkpoint.sealed import find_damage, remove_leftovers, set_damaged_aside
from mca_lib.checkpoint.source import TorchDist
from mca_lib.errors import CheckpointError
from mca_lib.parallel import seed_rank
from mca_lib.trainers.engine import Engine
from mca_lib.trainers.optimizer import allocate_moments

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainerState:
    """What a checkpoint says beside its tensors."""

    step: int
    totals: dict[str, Any]
    run: dict[str, Any]
    """What the run is about: a checkpoint of another run must not be resumed."""
    layout: dict[str, int]
    best: dict[str, Any] | None = None
    """Step and loss of the best evaluation until then, whose weights are in `best-<step>`; None without one."""


def find_checkpoint(output_dir: Path, run: dict[str, Any]) -> Path | None:
    """The newest whole checkpoint of this run, the same on every rank.

    Damaged ones are set aside with a warning, under a name that nothing resumes from.

    Raises:
        CheckpointError: the newest whole checkpoint belongs to a run with other settings.
    """

    def search() -> str | None:
        damaged = None
        remove_leftovers(output_dir)
        for path in reversed(numbered(output_dir, PREFIX).values()):
            if damage := find_damage(path) or _damage_of_best(path):
                log.warning("%s cannot be resumed from: %s; trying the one before", path, damage)
                damaged = set_damaged_aside(path)
                continue
            _check_run(path, run)
            return str(path)
        if damaged:
            log.warning("%s holds no other checkpoint: training starts from the beginning", output_dir)
        return None

    found = from_rank_0(search)
    return Path(found) if found else None


def load_checkpoint(path: Path, engine: Engine, seed: int) -> TrainerState:
    """Put weights, moments, schedule and random states back; all ranks take part.

    Raises CheckpointError where this run's optimizer cannot take the saved one's state.
    """
    state, distributed = _read_state(path), engine.args.use_distributed_optimizer
    _check_optimizer_form(path, distributed)
    if not distributed:
        _check_optimizers(path, state.layout, layout(engine))
    with translated_failures(path / STATE_FOLDER, "read"):
        loaded = dist_checkpointing.load(sharded_state(engine, is_loading=True), str(path / STATE_FOLDER))
    if distributed:
        loaded["optimizer"] = with_own_groups(loaded["optimizer"], engine.optimizer)
    put_back(engine, loaded)
    engine.skipped_steps = loaded["skipped_steps"]
    engine.scheduler.step(increment=state.step - engine.skipped_steps)
    resume_random_states(path, state.layout, engine, seed + state.step)
    return state


def put_back(engine: Engine, loaded: dict[str, Any]) -> None:
    """Weights, and where they were loaded masters and moments, into what is trained."""
    for index, chunk in enumerate(engine.bare_chunks):
        trained_part(chunk).load_state_dict(loaded[f"model{index}"])
    if "optimizer" in loaded:
        # Megatron 0.19.2 copies into leaf parameters there without no_grad of its own.
        with torch.no_grad():
            engine.optimizer.load_state_dict(loaded["optimizer"])


def resume_random_states(path: Path, saved: Mapping[str, int], engine: Engine, seed: int) -> None:
    """Those of this rank where the layout is the saved one; else new ones of `seed`."""
    if saved == layout(engine):
        restore_rng(torch.load(path / rng_name(dist.get_rank()), weights_only=True))
    else:
        seed_rank(seed)


def layout(engine: Engine) -> dict[str, int]:
    """The parallel sizes; two runs of one layout compute the same bits."""
    return {
        "world": dist.get_world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "chunks": len(engine.chunks),
        "context": parallel_state.get_context_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "expert tensor": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def _check_optimizer_form(path: Path, distributed: bool) -> None:
    """The distributed optimizer's state has a master of every weight, and other names than that of one that is not."""
    saved = TorchDist(path / STATE_FOLDER).has_distributed_states
    if saved != distributed:
        raise CheckpointError(
            f"{path} was made with use_distributed_optimizer={saved}, this run has {distributed}: neither takes the "
            f"other's state; use {saved}, or remove {path.parent} to train from the beginning"
        )


def _check_optimizers(path: Path, saved: Mapping[str, int], now: Mapping[str, int]) -> None:
    """Megatron (0.19.2) has a second optimizer for experts that are spread otherwise than the other weights.

    The state of one that is not distributed goes into as many optimizers as it is of.
    """
    if _spreads_experts(saved) != _spreads_experts(now):
        shown = [f"expert={sizes.get('expert', 1)} expert tensor={_expert_tensor(sizes)}" for sizes in (saved, now)]
        raise CheckpointError(
            f"{path} was made with {shown[0]}, this run has {shown[1]}: without use_distributed_optimizer a training "
            f"does not go on across that; use the old sizes (parallel of a recipe), or remove {path.parent} to train "
            "from the beginning"
        )


def _spreads_experts(sizes: Mapping[str, int]) -> bool:
    return sizes.get("expert", 1) > 1 or _expert_tensor(sizes) != sizes.get("tensor", 1)


def _expert_tensor(sizes: Mapping[str, int]) -> int:
    return sizes.get("expert tensor", sizes.get("tensor", 1))


def sharded_state(engine: Engine, *, is_loading: bool, optimizer: bool = True) -> dict[str, Any]:
    """What a checkpoint holds of this rank, as Megatron describes it: shards of what is trained and its optimizer.

    Args:
        is_loading: the shards are places to load into; of the optimizer they hold nothing yet.
        optimizer: False for the weights alone.
    """
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    engine.gather_weights()
    state: dict[str, Any] = {
        f"model{index}": trained_part(chunk).sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(engine.bare_chunks)
    }
    state["skipped_steps"] = engine.skipped_steps
    if not optimizer:
        return state
    if not is_loading:
        allocate_moments(engine.optimizer)  # as long as fp16 has skipped all steps there are none
    with places_without_padding(engine.optimizer):
        state["optimizer"] = engine.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return state


def trained_part(chunk: Any) -> Any:
    """The part of a model chunk that training changes."""
    return chunk if chunk.adapters is None else chunk.adapters


def _damage_of_best(checkpoint: Path) -> str | None:
    """What is wrong with the weights that a whole checkpoint names as the best; None when nothing is."""
    best = _read_state(checkpoint).best
    path = checkpoint.with_name(f"{BEST_PREFIX}{best['step']}") if best else None
    damage = find_damage(path) if path else None
    return f"{path.name}: {damage}" if path and damage else None


def _read_state(checkpoint: Path) -> TrainerState:
    return TrainerState(**json.loads((checkpoint / STATE_NAME).read_text()))


def _check_run(path: Path, run: dict[str, Any]) -> None:
    saved = _read_state(path).run
    if "hybrid" in run and "hybrid" not in saved:
        raise CheckpointError(
            f"{path} is of a transformer and this run trains a hybrid: use another output_dir, and give the checkpoint "
            "as load_checkpoint to go on from it"
        )
    if "hybrid" in saved and "hybrid" not in run:
        raise CheckpointError(f"{path} is of a hybrid and this run trains a transformer: use another output_dir")
    for name, value in run.items():
        if saved.get(name) != value:
            raise CheckpointError(
                f"{path} was made with {name}={saved.get(name)!r}, this run has {value!r}: "
                "use another output_dir, or remove the checkpoint"
            )


def rng_name(rank: int) -> str:
    """File of a rank's random states in a checkpoint."""
    return f"rng_{rank}.pt"


def rng_state() -> dict[str, Any]:
    """Tensors, numbers and text only: it is read with `weights_only`, and runs no code of whoever wrote it."""
    generator, keys, *rest = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (generator, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    generator, keys, *rest = state["numpy"]
    np.random.set_state((generator, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
