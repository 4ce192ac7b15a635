"""What a checkpoint of the distributed optimizer says beside tensors, for an optimizer that is arranged otherwise.

Megatron-Core (0.19.2) stores masters and moments under the names of weights, which any layout and any model with these
weights finds. The parameter groups it stores as the run had them, and takes them as they are: found by all of their
settings, so that another learning rate is a KeyError, and one list for each optimizer, of which there is a second where
experts are spread otherwise than the other weights. Here groups stay those of the run that loads; of the stored ones
comes Adam's step, and the loss scale of fp16.
"""

from collections.abc import Iterator
from typing import Any

from megatron.core.optimizer.optimizer import MegatronOptimizer

from mca_lib.trainers.optimizer import optimizer_parts


def with_own_groups(loaded: dict[Any, Any], optimizer: MegatronOptimizer, *, loss_scale: bool = True) -> dict[Any, Any]:
    """The optimizer's loaded state with the parameter groups of this run, at the step of the loaded ones.

    Args:
        loaded: what `dist_checkpointing.load` returned for a request of this optimizer: its tensors, and beside them
            what the checkpoint has of its own optimizers.
        loss_scale: take that of fp16 too. It is of a sum over tokens here, and of a mean in Megatron-LM.
    """
    parts, stored = optimizer_parts(optimizer), list(_states(loaded))
    # One for all weights: Megatron counts so, and leaves it out of groups without a weight on the rank that wrote.
    steps = [group["step"] for state in stored for group in state["optimizer"]["param_groups"] if "step" in group]
    scaler = next((state["grad_scaler"] for state in stored if "grad_scaler" in state), None)
    common = {"grad_scaler": scaler} if loss_scale and scaler is not None else {}
    if len(parts) == 1:
        return _own_state(parts[0], loaded, steps) | common
    return {index: _own_state(part, loaded.get(index, {}), steps) | common for index, part in enumerate(parts)}


def _states(loaded: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """Of each optimizer that the checkpoint was written with, what is stored beside tensors."""
    if "param_groups" in loaded.get("optimizer", {}):
        yield loaded
    yield from (state for key, state in loaded.items() if isinstance(key, int) and "optimizer" in state)


def _own_state(part: MegatronOptimizer, loaded: dict[str, Any], steps: list[int]) -> dict[str, Any]:
    if part.optimizer is None:
        return loaded
    groups = part.state_dict()["optimizer"]["param_groups"]
    for group in groups if steps else ():
        group["step"] = max(steps)
    return {
        "optimizer": {"param_groups": groups},
        "param_state": loaded["param_state"],
        "param_state_sharding_type": "fully_reshardable",
    }
