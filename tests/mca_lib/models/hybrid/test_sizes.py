"""Sizes of Mamba layers: given, derived, refused."""

import pytest

from mca_lib.errors import ConfigError
from mca_lib.models.config_parts import Mamba2
from mca_lib.models.hybrid.sizes import hybrid_layers, mamba_sizes


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Mamba2(num_heads=18, head_dim=64)),
        ({"num_heads": 36, "head_dim": None}, Mamba2(num_heads=36, head_dim=32)),
        ({"head_dim": 32, "state_size": 16}, Mamba2(num_heads=36, head_dim=32, state_size=16)),
        ({"num_heads": 5, "head_dim": 7}, Mamba2(num_heads=5, head_dim=7)),
    ],
)
def test_the_inner_size_is_twice_the_hidden_size_unless_heads_and_channels_are_given(given: dict, expected: Mamba2):
    assert mamba_sizes(576, given) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_heads": 7}, r"^checkpoint\.mamba\.num_heads: 7 does not divide .* 2 x the model's 576 channels = 1152"),
        ({"num_heads": 0}, r"^checkpoint\.mamba\.num_heads: 0 does not divide"),
        ({"num_heads": "4"}, r"^checkpoint\.mamba\.num_heads: '4' does not divide"),
        ({"num_heads": 3, "head_dim": 8, "num_groups": 2}, r"^checkpoint\.mamba\.\*: 3 Mamba heads do not divide"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_the_users_name(given: dict, said: str):
    with pytest.raises(ConfigError, match=said):
        mamba_sizes(576, given, "checkpoint.mamba.")


def test_a_pattern_without_mamba_layers_has_no_sizes():
    assert hybrid_layers("*-*-", 576, {}).mamba is None
    assert hybrid_layers("M*-", 576, {"state_size": 16}).mamba.state_size == 16
