"""Names of modules that are not trained: what they stand for, and what is said of those that stand for nothing."""

import pytest

from mca_lib.converter.plan import entries
from mca_lib.errors import ConfigError
from mca_lib.models.config import HybridLayers, Mamba2
from mca_lib.models.freeze import frozen_weights
from mca_lib.models.registry import config_from_hf
from tests.mca_lib.tiny_models import hf_config


def llama():
    return config_from_hf(hf_config("llama").to_dict())


def test_names_are_matched_at_their_ends_by_whole_parts():
    frozen = frozen_weights(llama(), ["embed_tokens", "layers.1", "up_proj", "gate_proj"])
    assert "embedding.word_embeddings.weight" in frozen
    assert "decoder.layers.1.self_attention.linear_qkv.weight" in frozen
    assert "decoder.layers.1.mlp.linear_fc2.weight" in frozen
    assert "decoder.layers.0.mlp.linear_fc1.weight" in frozen
    assert "decoder.layers.0.mlp.linear_fc2.weight" not in frozen


def test_a_full_name_stands_for_all_below_it():
    frozen = frozen_weights(llama(), ["model.layers"])
    assert frozen
    assert all(name.startswith("decoder.layers.") for name in frozen)


@pytest.mark.parametrize(
    ("freeze", "said"),
    [
        (["embed_token"], "no module of the model is called 'embed_token'; did you mean embed_tokens"),
        (["layers.99"], "no module of the model is called 'layers.99'"),
        (["mbed_tokens.weight"], "no module"),
        (["q_proj"], r"q_proj.weight is a part of one weight in Megatron; name all of q_proj, k_proj, v_proj"),
        (["model", "lm_head"], "leaves nothing to train"),
    ],
)
def test_names_that_cannot_be_frozen(freeze, said):
    with pytest.raises(ConfigError, match=said):
        frozen_weights(llama(), freeze)


def test_of_a_hybrid_the_transformer_can_be_frozen_whole_or_in_parts():
    hybrid = llama().with_hybrid(HybridLayers("M" + "*-" * llama().num_layers, Mamba2(num_heads=4, head_dim=16)))
    names = {entry.mca for entry in entries(hybrid)}
    fresh = {name for name in names if name.startswith("decoder.layers.0.mixer.")}
    assert len(fresh) == 9
    assert names - frozen_weights(hybrid, ["transformer"]) == fresh
    assert frozen_weights(hybrid, ["mamba"]) == {name for name in fresh if "layer_norm" not in name}
    with pytest.raises(
        ConfigError, match="transformer is all of a hybrid but its Mamba layers, and this model has none"
    ):
        frozen_weights(llama(), ["transformer"])
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        frozen_weights(hybrid, ["transformer", "layers.0"])
