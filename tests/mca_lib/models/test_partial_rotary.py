"""Heads of which a part rotates: read where transformers reads the share, written where its release does."""

from dataclasses import replace
from typing import Any

import pytest

from mca_lib.errors import ConfigError, ModelError
from mca_lib.models.config import HybridLayers, Mamba2, McaModelConfig
from mca_lib.models.families.partial_rotary import share_of
from mca_lib.models.registry import FAMILIES, config_from_hf
from tests.mca_lib.models.test_registry import BASES

GLM = {**BASES["glm4_moe"], "head_dim": 32, "max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
SPELLINGS: dict[str, tuple[int | None, dict[str, Any]]] = {
    "absent": (16, {}),
    "transformers 4": (8, {"rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.25}),
    "transformers 5": (24, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}),
    "scaled": (24, {"rope_parameters": {**YARN, "partial_rotary_factor": 0.75}}),
    "scaled, outside": (8, {"rope_parameters": YARN, "partial_rotary_factor": 0.25}),
    "whole": (None, {"partial_rotary_factor": 1.0}),
    "rounded down": (10, {"partial_rotary_factor": 0.34}),
}
"""Name → (channels that rotate of 32, fields)."""


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_frequencies_are_transformers(ranks: Any, spelling: str) -> None:
    channels, fields = SPELLINGS[spelling]
    assert config_from_hf({**GLM, **fields}).rotary_channels == channels
    ((theirs, ours),) = ranks(1, frequencies, {**GLM, **fields})
    assert ours == theirs


def frequencies(hf: dict[str, Any]) -> tuple[tuple[list[float], float], tuple[list[float], float]]:
    """(inverse frequencies, factor of cos and sin) of transformers, and those that a model runs with."""
    import math

    from transformers import AutoConfig
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

    from mca_lib.models import AutoModel
    from mca_lib.parallel import DistributingParallelArguments, initialize_model_parallel

    initialize_model_parallel(DistributingParallelArguments())
    (model,) = AutoModel.from_config(config_from_hf(hf))
    attention = model.decoder.layers[0].self_attention
    factor = attention._yarn_concentration_factor * math.sqrt(attention.core_attention.scale * math.sqrt(32))
    theirs = Glm4MoeRotaryEmbedding(AutoConfig.for_model(**hf))
    return (
        (theirs.inv_freq.tolist(), round(theirs.attention_scaling, 12)),
        (model.rotary_pos_emb.inv_freq.tolist(), round(factor, 12)),
    )


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("major", [4, 5, None])
@pytest.mark.parametrize("channels", [None, 6, 8, 24])
def test_every_share_is_written_where_the_release_reads_it(spelling: str, major: int | None, channels: int) -> None:
    family, config = FAMILIES["glm4_moe"], config_from_hf({**GLM, **SPELLINGS[spelling][1]})
    written = family.config_to_hf(replace(config, rotary_channels=channels), major)
    assert config_from_hf(written).rotary_channels == channels
    if major == 4:
        assert "partial_rotary_factor" not in (written.get("rope_scaling") or {})
        assert "rope_parameters" not in written or not SPELLINGS[spelling][1].get("rope_parameters")
    if major is None and channels == config.rotary_channels:
        assert written == {**GLM, **SPELLINGS[spelling][1]}
    assert McaModelConfig.from_dict(config.to_dict()) == config


def test_a_share_is_that_of_its_channels_for_every_head() -> None:
    for head in range(2, 300):
        for channels in range(1, head + 1):
            assert int(head * share_of(channels, head)) == channels


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 cannot be used"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor='half'"),
        ({"partial_rotary_factor": 0.03}, "no channels of a head of 32 rotate"),
        ({"partial_rotary_factor": 0.29}, r"rotary_channels=9 \(partial_rotary_factor\) must be even"),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            "rope_parameters.partial_rotary_factor and partial_rotary_factor are both given and differ",
        ),
    ],
)
def test_a_share_that_cannot_be_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        config_from_hf({**GLM, **fields})
    assert "\n" not in str(error.value)


def test_the_channels_of_minimax_are_read_and_another_share_outweighs_them() -> None:
    """As in `MiniMaxM2Config`, whose share of the config is the channels by the head's where there is no share."""
    from transformers import AutoConfig

    hf = {**BASES["minimax_m2"], "head_dim": 32, "rotary_dim": 8}
    assert config_from_hf(hf).rotary_channels == 8
    assert AutoConfig.for_model(**hf).rope_parameters["partial_rotary_factor"] == 8 / 32
    changed = FAMILIES["minimax_m2"].config_to_hf(replace(config_from_hf(hf), rotary_channels=16))
    assert config_from_hf(changed).rotary_channels == 16
    assert AutoConfig.for_model(**changed).rope_parameters["partial_rotary_factor"] == 16 / 32


def test_hybrids_that_are_exported_with_their_own_code_have_whole_heads() -> None:
    config = config_from_hf({**GLM, "num_nextn_predict_layers": 0, "first_k_dense_replace": 0})
    with pytest.raises(
        ConfigError, match=r"^checkpoint\.pattern: a glm4_moe model .* it has heads of which only a part"
    ):
        config.with_hybrid(HybridLayers("M*E" * config.num_layers, Mamba2(8, 8)), "checkpoint.pattern")
