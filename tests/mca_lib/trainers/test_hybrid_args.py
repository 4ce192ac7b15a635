"""Arguments of hybrids: what they make of a transformer, and what contradicts itself."""

from typing import Any

import pytest

from mca_lib.errors import ConfigError
from mca_lib.models.config_parts import HybridLayers, Mamba2
from mca_lib.trainers.hybrid_args import HybridArguments
from mca_lib.trainers.training_args import TrainingArguments


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hybrid_layer_pattern": "M*-Q"}, "'Q' is no layer"),
        ({"hybrid_layer_pattern": "*-", "fresh_layers": "zeros"}, "fresh_layers='zeros': use random or zero_output"),
        ({"hybrid_layer_pattern": "M*-", "fresh_seed": -1}, "fresh_seed=-1: use a whole number from 0"),
        ({"hybrid_layer_pattern": "M*-", "fresh_seed": 1.5}, "fresh_seed=1.5: use a whole number from 0"),
        ({"fresh_seed": 3}, "fresh_seed=3 has no effect without hybrid_layer_pattern"),
        ({"mamba_head_dim": 16}, "mamba_head_dim=16 has no effect without hybrid_layer_pattern"),
        ({"finetune": True}, "finetune=True has no effect without load_checkpoint"),
        ({"no_load_optim": True}, "no_load_optim=True has no effect without load_checkpoint"),
    ],
)
def test_fields_that_contradict_each_other(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingArguments(output_dir="out", **fields)


def test_what_a_transformer_becomes() -> None:
    pattern = HybridArguments(hybrid_layer_pattern="M*-|*-", mamba_head_dim=16, mamba_state_size=8)
    assert pattern.hybrid_layers(64) == HybridLayers("M*-*-", Mamba2(num_heads=8, head_dim=16, state_size=8))
    assert HybridArguments(hybrid_layer_pattern="*-*-").hybrid_layers(64) == HybridLayers("*-*-")
    assert HybridArguments().hybrid_layers(64) is None
    assert HybridArguments(hybrid_layer_pattern="*-", use_legacy_model=True).hybrid_layers(64) is None
