"""Patterns: what they say, which of them a transformer can become, and the way back."""

from dataclasses import replace

import pytest

from mca_lib.errors import ConfigError, ModelError
from mca_lib.models.config import HybridLayers, Mamba2, McaModelConfig
from mca_lib.models.config_parts import Experts
from mca_lib.models.hybrid.pattern import (
    LayerMap,
    check_translatable,
    interpolated,
    model_pattern,
    parse_pattern,
)

MAMBA = Mamba2(num_heads=4, head_dim=16, state_size=8)
DENSE = McaModelConfig(
    model_type="llama",
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    vocab_size=64,
    max_position_embeddings=128,
)
EXPERTS = replace(DENSE, model_type="qwen3_moe", moe=Experts(4, 2, 16, layers=(0, 1)))


def test_a_pattern_is_taken_apart() -> None:
    pattern = parse_pattern("M*-|*-")
    assert pattern.segments == ("M*-", "*-")
    assert pattern.layers == "M*-*-"
    assert pattern.positions("*") == (1, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is missing"),
        ("  ", "is missing"),
        ("M*-/M", "remove '/M'"),
        ("M*-X", "'X' is no layer"),
        ("M*-||*-", "has no layers"),
        ("|*-", "has no layers"),
        (5, "is missing"),
        ("M" * 10_001, "has 10001 symbols, and at most 10000"),
    ],
)
def test_a_pattern_that_says_nothing_clear_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="checkpoint.pattern.*" + said.replace("'", "'")):
        parse_pattern(text, "checkpoint.pattern")


def test_pipeline_stages_are_no_part_of_a_model() -> None:
    assert model_pattern("M*-*-", "checkpoint.pattern") == "M*-*-"
    with pytest.raises(ConfigError, match=r"with it in parallel\.pipeline_layout"):
        model_pattern("M*-|*-", "checkpoint.pattern")


@pytest.mark.parametrize(
    ("text", "has_experts", "said"),
    [
        ("M**-", False, r"2 attention \(\*\) and 1 MLP"),
        ("MM", False, r"0 attention \(\*\) and 0 MLP"),
        ("*-*-*-", False, "3 attention and MLP layers, and the transformer has 2; .*--layers 2"),
        ("G*-*-", False, r"G \(gated delta net\) cannot start from a transformer"),
        ("D-*-", False, r"D \(sparse attention \(DSA\)\) cannot start"),
        ("+-*-", False, r"\+ \(latent attention\) cannot start"),
        ("*-*E", False, r"mixes dense \(-\) and MoE \(E\)"),
        ("*E*E", False, "write - for E"),
        ("*-*-", True, "write E for -"),
        ("-**-", False, "an MLP comes before the attention of its layer"),
        ("*-*-/M", False, "multi-token prediction"),
    ],
)
def test_a_pattern_that_no_transformer_becomes_is_refused(text: str, has_experts: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_translatable(text, 2, has_experts=has_experts)


def test_layers_are_where_the_pattern_has_them() -> None:
    found = check_translatable("M*-|M*-", 2, has_experts=False)
    assert found == LayerMap("M*-M*-")
    assert (found.attention, found.mlp, found.fresh) == ((1, 4), (2, 5), (0, 3))
    assert found.transformer_layer == {1: 0, 2: 0, 4: 1, 5: 1}


def test_patterns_are_written_for_a_number_of_layers() -> None:
    assert interpolated(4, 2) == "M*-*-M*-*-"
    assert interpolated(2, 1, has_experts=True) == "M*EM*E"
    assert interpolated(2, 0) == "*-*-"
    for layers, every in ((0, 1), (2, -1), (10**12, 1)):
        with pytest.raises(ConfigError, match=r"at (least|most)"):
            interpolated(layers, every)


@pytest.mark.parametrize(("config", "pattern"), [(DENSE, "M*-*-"), (EXPERTS, "M*E*E")])
def test_a_transformer_becomes_a_hybrid_and_is_found_in_it(config: McaModelConfig, pattern: str) -> None:
    windowed = replace(config, sliding_window=16, full_attention_layers=(1,))
    hybrid = windowed.with_hybrid(HybridLayers(pattern, MAMBA))
    assert hybrid.num_layers == 5
    assert hybrid.full_attention_layers == (3,)
    assert hybrid.mamba_layers == (0,)
    assert hybrid.attention_layers == (1, 3)
    assert (hybrid.moe_layers or hybrid.dense_layers) == (2, 4)
    assert not hybrid.stacked_layers
    assert hybrid.transformer == windowed


def test_a_hybrid_config_is_written_and_read() -> None:
    hybrid = DENSE.with_hybrid(HybridLayers("M*-*-", MAMBA))
    assert McaModelConfig.from_dict(hybrid.to_dict()) == hybrid
    values = hybrid.to_dict()
    values["hybrid"]["mamba"]["head_dims"] = 3
    with pytest.raises(ConfigError, match="did you mean 'head_dim'"):
        McaModelConfig.from_dict(values)


@pytest.mark.parametrize(
    ("pattern", "said"), [("M*-*X", "'X' is no layer"), ("M*-*/", "remove '/'"), ("M*-|*", r"\(\|\)")]
)
def test_a_config_whose_pattern_is_none_is_refused(pattern: str, said: str) -> None:
    values = DENSE.with_hybrid(HybridLayers("M*-*-", MAMBA)).to_dict()
    values["hybrid"]["pattern"] = pattern
    with pytest.raises(ConfigError, match=rf"^mca_config\.json: model config: hybrid\.pattern=.*{said}"):
        McaModelConfig.from_dict(values)


def test_a_norm_without_epsilon_is_refused() -> None:
    with pytest.raises(ModelError, match="norm_epsilon=0 must be greater than 0"):
        replace(MAMBA, norm_epsilon=0)


@pytest.mark.parametrize("fields", [(None,), (5,), ("M*-*-", {"num_heads": 4})])
def test_layers_of_another_type_are_refused(fields: tuple) -> None:
    with pytest.raises(ModelError, match="pattern must be a text and mamba a Mamba2"):
        HybridLayers(*fields)


def test_only_layers_without_pipeline_stages_make_a_hybrid() -> None:
    with pytest.raises(ConfigError, match=r"stages \(\|\) belong to a run"):
        DENSE.with_hybrid(HybridLayers("*-|*-"))
    with pytest.raises(ConfigError, match="hybrid_layer_pattern: needs a HybridLayers, found 'M"):
        DENSE.with_hybrid("M*-*-")


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"mtp_num_layers": 1}, "multi-token prediction"), ({"moe": Experts(4, 2, 16, layers=(1,))}, "all must be alike")],
)
def test_a_transformer_that_no_hybrid_has_is_refused(changed: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(DENSE, **changed).with_hybrid(HybridLayers("*-*-"))
