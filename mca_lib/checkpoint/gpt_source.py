"""Starting a run from the checkpoint of another training: of a transformer that becomes a hybrid, or goes on as it is.

    weights           read at this run's layout; layers that the transformer lacks keep their fresh values
    optimizer         fp32 masters, moments and Adam's step, unless `no_load_optim`; the run's own rates and decay
    progress          step, skipped steps, learning rate and place in the data, unless `finetune`
    random states     with progress, from a checkpoint of this trainer at the same layout; else new ones

Moments of layers that the transformer lacks are 0, at the step of all others, so Adam's correction of young moments is
that of an old training. Megatron's distributed optimizer asserts one step for all parameter groups when it saves and
when it loads (0.19.2), so these layers cannot have a group at a step of their own.
"""

from collections.abc import Iterator
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from mca_lib.checkpoint.collective import raise_everywhere
from mca_lib.checkpoint.fsdp_dtensor import FsdpCheckpoint
from mca_lib.checkpoint.fsdp_load import load_fsdp_dtensor
from mca_lib.checkpoint.gpt_interop_fixes import request
from mca_lib.checkpoint.model import translated_failures
from mca_lib.checkpoint.parameter_groups import with_own_groups
from mca_lib.checkpoint.source import Source
from mca_lib.checkpoint.training import put_back, resume_random_states
from mca_lib.errors import CheckpointError
from mca_lib.models.hybrid.pattern import LayerMap
from mca_lib.trainers.engine import Engine


def start_from(source: Source, engine: Engine, layers: LayerMap | None) -> int:
    """Load a source that `check_source` has let pass; collective. Returns the step that the run is at.

    Args:
        layers: of the hybrid that the engine trains; None where the source is of the same model.

    Raises:
        CheckpointError: a tensor of the model is missing, of another shape or unreadable.
    """
    args = engine.args
    if isinstance(source.contents, FsdpCheckpoint):
        load_fsdp_dtensor(source.tensors, engine, optimizer=not args.no_load_optim)
        skipped = 0
    else:
        skipped = _load_torch_dist(source, engine, layers)
    if args.finetune:
        engine.scheduler.step(increment=0)  # the rate of the first step, in groups that were loaded
        return 0
    engine.skipped_steps = skipped
    engine.scheduler.step(increment=source.step - engine.skipped_steps)
    resume_random_states(source.path, source.layout, engine, args.seed + source.step)
    return source.step


def _load_torch_dist(source: Source, engine: Engine, layers: LayerMap | None) -> int:
    """Returns the steps that were skipped."""
    has_optimizer = not engine.args.no_load_optim
    wanted = request(engine, layers, optimizer=has_optimizer)
    raise_everywhere(_mismatch(wanted, source))
    with translated_failures(source.tensors, "read"):
        loaded = dist_checkpointing.load(wanted, str(source.tensors))
    if has_optimizer:
        is_ours = bool(source.layout)
        loaded["optimizer"] = with_own_groups(loaded["optimizer"], engine.optimizer, loss_scale=is_ours)
    else:
        loaded.pop("optimizer", None)  # what the checkpoint has of it beside tensors
    put_back(engine, loaded)
    _agree(engine, masters_loaded=has_optimizer)
    return loaded.get("skipped_steps", 0)


def _agree(engine: Engine, *, masters_loaded: bool) -> None:
    """Weights and masters are the same numbers on every replica, whichever of them were loaded.

    In an fp32 run a rank's masters are its share of the weights: of a bf16 checkpoint they are more exact than the
    weights that the other replicas have read.
    """
    if not masters_loaded:
        engine.optimizer.reload_model_params()
    elif engine.args.use_distributed_optimizer:
        for chunk in engine.chunks:
            chunk.start_param_sync(force_sync=True)


def _mismatch(wanted: dict[str, Any], source: Source) -> CheckpointError | None:
    """What the checkpoint lacks of a request, or has in another shape."""
    stored = {key: tuple(meta.size) for key, meta in source.contents.stored.items()}
    problems = []
    for shard in _tensors(wanted):
        if shard.key not in stored:
            problems.append(f"{shard.key} is missing")
        elif not shard.allow_shape_mismatch and stored[shard.key] != shard.global_shape:
            problems.append(f"{shard.key} has shape {list(stored[shard.key])}, expected {list(shard.global_shape)}")
    if not problems:
        return None
    problems = sorted(set(problems))
    shown = "; ".join(problems[:4])
    return CheckpointError(f"{source.path}: of another model: {shown} ({len(problems)} in all)")


def _tensors(state: dict[str, Any]) -> Iterator[ShardedTensor]:
    for value in nested_values(state):
        if isinstance(value, ShardedTensorFactory):
            built = value.build()
            yield from _tensors(built) if isinstance(built, dict | list) else [built]
        elif isinstance(value, ShardedTensor):
            yield value
