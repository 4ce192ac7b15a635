"""Megatron-Core's reading of GPT checkpoints into hybrid models, and what it lacks (0.19.2).

`megatron.core.dist_checkpointing.gpt_checkpoint_interop` points a hybrid's own sharded state at a GPT checkpoint.
Two things go wrong with the distributed optimizer; `test_gpt_interop_fixes.py` fails once they no longer do.

1. What the checkpoint does not have stays "as it is in the request", and a request for loading has zeros for the fp32
   masters: layers without a counterpart are dead, in fp32 at once and in bf16 from the first step. `request` asks with
   the values that the optimizer has.
2. Parameter groups come with the settings of the GPT run, and are found by them: see `parameter_groups`.
"""

from typing import Any

from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
    gpt_compatible_layer_maps,
    retarget_sharded_state_dict_to_gpt_checkpoint,
)

from mca_lib.checkpoint.training import sharded_state
from mca_lib.models.hybrid.pattern import LayerMap
from mca_lib.trainers.engine import Engine


def request(engine: Engine, layers: LayerMap | None, *, optimizer: bool) -> dict[str, Any]:
    """What to load into the engine from a transformer's checkpoint; layers that it lacks bring their own values.

    Args:
        layers: of the hybrid that the engine trains; None where the checkpoint is of the same model.
    """
    has_fresh = layers is not None and bool(layers.fresh)
    state = sharded_state(engine, is_loading=not has_fresh, optimizer=optimizer)
    if layers is not None:
        maps = gpt_compatible_layer_maps(layers.layers)
        for part in state.values():
            if isinstance(part, dict):
                retarget_sharded_state_dict_to_gpt_checkpoint(part, maps)
    return state
