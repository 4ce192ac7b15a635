"""Inverse frequencies and the factor of cos and sin are transformers' own, to the bit, for every kind of rope."""

from typing import Any

import pytest

from mca_lib.models.registry import config_from_hf
from tests.mca_lib.models.test_registry import BASE

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": _YARN,
    "yarn, not truncated": {**_YARN, "truncate": False},
    "yarn, other bounds": {**_YARN, "beta_fast": 20.0, "beta_slow": 3.0},
    "yarn, both scales": {**_YARN, "mscale": 0.8, "mscale_all_dim": 0.5},
    "yarn, one scale": {**_YARN, "mscale": 0.8},
    "yarn, a scale of zero": {**_YARN, "mscale": 0.8, "mscale_all_dim": 0},
    "yarn, attention factor": {**_YARN, "attention_factor": 1.7},
    "yarn that shrinks": {**_YARN, "factor": 0.5},
    "yarn, bounds beyond the head": {**_YARN, "original_max_position_embeddings": 4},
}

WITHOUT_EFFECT = ("plain", "yarn, bounds beyond the head")


def frequencies(hf: dict[str, Any]) -> tuple[list[float], float, list[float], float]:
    """transformers' inverse frequencies and factor, then ours."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from mca_lib.models.rotary import attention_factor, inverse_frequencies

    theirs = LlamaRotaryEmbedding(AutoConfig.for_model(**hf))
    config = config_from_hf(hf)
    ours = inverse_frequencies(config.kv_channels, config.rotary_base, config.rope_scaling)
    return theirs.inv_freq.tolist(), theirs.attention_scaling, ours.tolist(), attention_factor(config.rope_scaling)


@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_are_transformers(ranks: Any, rope: str, base: float) -> None:
    hf = {**BASE, "head_dim": 64, "max_position_embeddings": 4096}
    hf["rope_parameters"] = {"rope_theta": base, **ROPES[rope]}
    ((theirs, their_factor, ours, factor),) = ranks(1, frequencies, hf)
    assert (ours, factor) == (theirs, their_factor)


def model_rope(hf: dict[str, Any]) -> tuple[list[float], float]:
    """Inverse frequencies and softmax scale that a model runs with."""
    from mca_lib.models import AutoModel
    from mca_lib.parallel import DistributingParallelArguments, initialize_model_parallel

    initialize_model_parallel(DistributingParallelArguments())
    (model,) = AutoModel.from_config(config_from_hf(hf))
    return model.rotary_pos_emb.inv_freq.tolist(), model.decoder.layers[0].self_attention.core_attention.scale


@pytest.mark.parametrize("rope", [name for name in ROPES if name not in WITHOUT_EFFECT])
def test_scaling_changes_the_model_that_runs(ranks: Any, rope: str) -> None:
    hf = {**BASE, "head_dim": 64, "max_position_embeddings": 4096}
    plain = ranks(1, model_rope, hf)
    scaled = ranks(1, model_rope, {**hf, "rope_parameters": {"rope_theta": 1e4, **ROPES[rope]}})
    assert plain[0][0] != scaled[0][0]
    if rope in ("yarn", "yarn, attention factor"):
        assert plain[0][1] < scaled[0][1]
