"""Names of a transformer's tensors in a hybrid."""

import pytest

from mca_lib.models.hybrid.names import transformer_name
from mca_lib.models.hybrid.pattern import LayerMap

LAYERS = LayerMap("M*-M*-")

PAIRS = {
    "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
    ),
    "decoder.layers.1.mlp.linear_fc2.weight": "decoder.layers.5.mlp.linear_fc2.weight",
    "decoder.layers.1.pre_mlp_layernorm.weight": "decoder.layers.5.pre_mlp_layernorm.weight",
    "decoder.final_layernorm.weight": "decoder.final_norm.weight",
    "output_layer.weight": "output_layer.weight",
}


@pytest.mark.parametrize(("transformer", "hybrid"), PAIRS.items())
def test_a_transformers_tensor_is_found_by_its_name_in_the_hybrid(transformer, hybrid):
    assert transformer_name(hybrid, LAYERS) == transformer


def test_a_tensor_of_a_fresh_layer_has_no_name_in_the_transformer():
    assert transformer_name("decoder.layers.3.mixer.A_log", LAYERS) is None
