"""Which model the arguments of a run make of a directory's: the cases that are a hybrid already."""

from typing import Any

import pytest

from mca_lib.errors import ConfigError
from mca_lib.models.hybrid.run_config import run_config
from mca_lib.trainers.hybrid_args import HybridArguments
from tests.mca_lib.models.hybrid.configs import hybrid_config


def test_pipeline_stages_of_a_hybrids_own_pattern_leave_its_sizes() -> None:
    hybrid = hybrid_config("dense", num_heads=6, head_dim=5)  # derived sizes would be others
    assert run_config(hybrid, HybridArguments(hybrid_layer_pattern="M*-*-|M*-*-")) == hybrid
    assert run_config(hybrid, HybridArguments(hybrid_layer_pattern="M*-*-M*-*-", mamba_head_dim=5)) == hybrid


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mamba_state_size": 64}, "mamba_state_size=64 has no effect: .* its own is 16"),
        ({"mamba_head_dim": 7}, "mamba_head_dim=7 has no effect: .* its own is 8"),
        ({"fresh_layers": "zero_output"}, "fresh_layers='zero_output' has no effect: .* none of its layers is fresh"),
        ({"fresh_seed": 3}, "fresh_seed=3 has no effect"),
    ],
)
def test_layers_that_a_hybrid_has_are_not_made_again(fields: dict[str, Any], said: str) -> None:
    args = HybridArguments(hybrid_layer_pattern="M*-*-M*-*-", **fields)
    with pytest.raises(ConfigError, match=said):
        run_config(hybrid_config("dense"), args)


def test_a_hybrid_keeps_its_pattern() -> None:
    with pytest.raises(ConfigError, match="the model is a hybrid already"):
        run_config(hybrid_config("dense"), HybridArguments(hybrid_layer_pattern="*-*-*-*-"))
