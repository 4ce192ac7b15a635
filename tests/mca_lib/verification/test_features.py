"""The index of the cards says what a family has and what it cannot do."""

from dataclasses import fields

import pytest

from mca_lib.models.config import McaModelConfig
from mca_lib.models.registry import FAMILIES, config_from_hf
from mca_lib.verification.features import features
from mca_lib.verification.tiny import tiny_config

SAID = {
    "llama": ["llama3 rope", "biases (q k v o MLP)"],
    "phi3": ["windows", "longrope rope", "a part of a head rotates"],
    "deepseek_v3": ["latent attention", "groups of experts", "multi-token prediction"],
    "nemotron_h": ["Mamba-2 layers", "no positions", "relu2"],
}


@pytest.mark.parametrize("model_type", SAID)
def test_features_are_those_of_the_tiny_model(model_type: str) -> None:
    assert set(SAID[model_type]) <= set(features(config_from_hf(tiny_config(model_type))))


def test_no_two_families_are_said_to_be_alike_that_differ_in_a_kind_of_field() -> None:
    """A new kind of field has a word of its own, or its family could be taken for another one."""
    named: dict[tuple[str, ...], frozenset[str]] = {}
    for model_type in FAMILIES:
        config = config_from_hf(tiny_config(model_type))
        kinds = frozenset(
            f.name
            for f in fields(McaModelConfig)
            if type(getattr(config, f.name)) is bool and getattr(config, f.name) != f.default
        )
        said = tuple(features(config))
        assert named.setdefault(said, kinds) == kinds, (model_type, said)
