"""A hybrid that trains under Megatron-FSDP starts from a transformer's Megatron-FSDP checkpoint, as Megatron does it.

The hybrid's own request for a checkpoint is renamed to what a transformer has stored
(`retarget_fsdp_state_dict_to_gpt_checkpoint`) and read by torch.distributed.checkpoint, in place and shard by shard.
Megatron-Core (0.19.2) leaves two gaps there, which are mended here and nowhere else:

    what            without it                                                        mend
    parameter       the renamed copy gets them, the optimizer keeps learning rate 0   `_carried_back`
    groups          and step 1: of a run that goes on, Adam corrects the bias anew
    weights         masters are loaded, and the next forward pass computes with the   `install_optimized_model_weights`
                    weights of before

`mca_lib.checkpoint.fsdp_load` starts a training of ours, which is not under Megatron-FSDP, from the same checkpoint.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
    GPTCompatLayerMaps,
    gpt_compatible_layer_maps,
    retarget_fsdp_state_dict_to_gpt_checkpoint,
)
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.fsdp_dtensor_checkpoint import (
    handle_experts_in_state_dict,
    handle_fp8_extra_state_case,
    handle_swiglu_in_state_dict,
)
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from mca_lib.checkpoint.fsdp_dtensor import FsdpCheckpoint
from mca_lib.checkpoint.model import translated_failures
from mca_lib.models.config import McaModelConfig

GROUPS = "param_to_group_meta"
FORMAT = {"distrib_optim_sharding_type": "fsdp_dtensor"}


def load_gpt_into_fsdp_hybrid(
    model: FullyShardedDataParallel, optimizer: DistributedOptimizer, directory: str | Path, config: McaModelConfig
) -> int:
    """Fill a wrapped hybrid's masters, weights, moments and parameter groups; collective.

    Args:
        model: in 16 bit, within `Float16Module`, which Megatron's split of gated MLPs needs.
        optimizer: Megatron's for this model alone.
        config: of the hybrid.

    Returns:
        Steps that the checkpoint's run had made.

    Raises:
        CheckpointError: the checkpoint is not whole, is of another model, or has its vocabulary padded to other rows
            than the hybrid's is at its tensor parallel size; nothing has been changed then.
    """
    source = FsdpCheckpoint(directory)
    source.check(config.transformer, optimizer=True)
    step = source.step
    layers = gpt_compatible_layer_maps(config.hybrid.pattern)
    with _without_learning_rate(optimizer):
        # First the weights: that brings the shards into the model, where the optimizer looks up their names.
        weights = model.module.state_dict_for_save_checkpoint()
        own = optimizer.sharded_state_dict({}, is_loading=True, metadata=FORMAT)
    request = renamed(as_stored(model, weights, own), layers, source)
    with translated_failures(Path(directory), "read"):
        dcp.load(
            request,
            storage_reader=dcp.FileSystemReader(directory),
            planner=DefaultLoadPlanner(allow_partial_load=True),  # what must be there was checked above
        )
    own[GROUPS] = _carried_back(own[GROUPS], request["optimizer"][GROUPS], layers, source)
    optimizer.load_state_dict(own)
    model.module.install_optimized_model_weights()
    return step


def as_stored(model: FullyShardedDataParallel, weights: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict:
    """A model's and an optimizer's state under the names and in the pieces that a checkpoint has, as Megatron-LM
    prepares it; tensors are views."""
    weights = dict(weights)
    handle_fp8_extra_state_case(weights)
    weights, optimizer = handle_swiglu_in_state_dict(model.module, weights, dict(optimizer))
    state = {"model": handle_experts_in_state_dict(weights, model.config.num_moe_experts), "optimizer": optimizer}
    preprocess_state_dict_for_uneven_dtensor(state)
    return state


def renamed(state: Mapping[str, Any], layers: GPTCompatLayerMaps, source: FsdpCheckpoint) -> dict[str, Any]:
    """A hybrid's state under the names that the transformer's checkpoint has; fresh layers are left out."""
    return {
        part: retarget_fsdp_state_dict_to_gpt_checkpoint(value, layers, _keys(source, part), checkpoint_prefix=part)
        for part, value in state.items()
    }


def _carried_back(
    own: Mapping[str, Any], loaded: Mapping[str, Any], layers: GPTCompatLayerMaps, source: FsdpCheckpoint
) -> dict[str, Any]:
    """What was loaded of the parameter groups, under the hybrid's names.

    A fresh parameter gets what was loaded for its group, of which the transformer always has a member: all parameters
    of a group must say the same.
    """
    keys = _keys(source, "optimizer")
    groups: dict[int, Any] = {}  # Megatron gives all parameters of a group one object
    for name, group in own.items():
        for stored in retarget_fsdp_state_dict_to_gpt_checkpoint({name: {}}, layers, keys):
            groups.setdefault(id(group), loaded[stored])
    return {name: groups[id(group)] for name, group in own.items()}


def _keys(source: FsdpCheckpoint, part: str) -> tuple[str, ...]:
    return tuple(key for key in (*source.stored, *source.objects) if key.startswith(f"{part}."))


@contextlib.contextmanager
def _without_learning_rate(optimizer: DistributedOptimizer) -> Iterator[None]:
    """To allocate its state Megatron makes a step with gradients of 0, whose weight decay would move fresh layers."""
    groups = optimizer.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    try:
        for group in groups:
            group["lr"] = 0.0
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
