"""Each repair of `gpt_interop_fixes` is still needed: these tests fail when Megatron-Core no longer needs it."""

from typing import Any

import torch

from tests.mca_lib.checkpoint.source_training import FRESH, MAMBA, OPTIONS, engine_of


def fresh_masters(model: str, out: str, options: dict[str, Any]) -> list[bool]:
    """Which of the fresh layers' fp32 masters Megatron's own request for loading would make zero."""
    from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
        gpt_compatible_layer_maps,
        retarget_sharded_state_dict_to_gpt_checkpoint,
    )
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    from mca_lib.checkpoint.training import sharded_state

    state = sharded_state(engine_of(model, out, options), is_loading=True)["optimizer"]["param_state"]
    retarget_sharded_state_dict_to_gpt_checkpoint(state, gpt_compatible_layer_maps(options["hybrid_layer_pattern"]))
    kept = [states["param"] for states in state.values() if isinstance(states["param"], LocalNonpersistentObject)]
    return [not value.unwrap().any() for value in kept]


def load_with_another_rate(model: str, out: str, options: dict[str, Any]) -> str:
    """What Megatron says of an optimizer's state whose parameter groups had another learning rate."""
    engine = engine_of(model, out, options)
    state = engine.optimizer.state_dict()
    for group in state["optimizer"]["param_groups"]:
        group["max_lr"] *= 2
    try:
        with torch.no_grad():
            engine.optimizer.load_state_dict(state)
    except KeyError as error:
        return f"KeyError {error}"
    return str({group["max_lr"] for group in engine.optimizer.param_groups})


def test_megatrons_request_has_zeros_for_fresh_masters(ranks, source_folder, tmp_path):
    options = {**OPTIONS, **MAMBA, "hybrid_layer_pattern": FRESH}
    ((zeros),) = ranks(1, fresh_masters, f"{source_folder}/dense", str(tmp_path), options)
    assert len(zeros) == 2 * 9, "two Mamba layers of nine weights"
    assert all(zeros), "Megatron asks with real values now: `request` may always load with is_loading=True"


def test_megatron_finds_parameter_groups_by_their_rates(ranks, source_folder, tmp_path):
    (said,) = ranks(1, load_with_another_rate, f"{source_folder}/dense", str(tmp_path), OPTIONS)
    assert said.startswith("KeyError"), "Megatron finds them: `with_own_groups` may go if the rates stay this run's"
