"""A layout that does not fit a hybrid is refused before anything is allocated; its pattern with | is a layout."""

from dataclasses import replace

import pytest

from mca_lib.errors import ConfigError
from mca_lib.models.config import HybridLayers
from mca_lib.models.layout import Layout
from mca_lib.models.layout_rules import check_config_layout, chunks_of
from mca_lib.models.pipeline import hybrid_split, proposed_pattern
from mca_lib.models.registry import config_from_hf
from mca_lib.verification.tiny import tiny_config
from tests.mca_lib.models.hybrid.configs import hybrid_config


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"tensor": 2},
            r"parallel.tensor=2 does not divide the 1 groups of .* Mamba layers; use one of \[1\]",
        ),
        ({"context": 3}, r"parallel.context=3 does not fit the 8 heads in 1 groups .*; use one of \[1, 2, 4, 8\]"),
        ({"pipeline": 3}, r"parallel.pipeline=3 does not divide the model's 10 layers; .*last_stage_layers: 2"),
        ({"pipeline": 4}, r"parallel.pipeline=4 .* or set parallel.last_stage_layers: 1"),
        ({"pipeline": 2, "virtual_pipeline": 2}, "=4 does not divide the model's 10 .*last_stage_layers: 4"),
        ({"pipeline": 7}, r"write parallel.pipeline_layout: M\|\*\|-\*\|-M\|\*-\|\*\|-$"),
        ({"pipeline_layout": "M*-*-|M*-*-"}, "needs parallel.pipeline > 1"),
        ({"pipeline": 2, "pipeline_layout": "Et*5|t*5L"}, "'5' is no layer"),
        ({"pipeline": 2, "pipeline_layout": "M*-*-M|*-*-M"}, r"has other layers than the model, .* 'M\*-\*-M\*-\*-'"),
        ({"pipeline": 2, "pipeline_layout": "M*-|*-M|*-|*-"}, "has 4 chunks, .* set parallel.virtual_pipeline: 2"),
        ({"pipeline": 2, "pipeline_layout": "M*-*-M*-*-|"}, "a pipeline stage between | has no layers"),
        ({"pipeline": 2, "pipeline_layout": "M*-*-|M*-*-", "first_stage_layers": 5}, "cannot go with"),
        ({"expert": 2}, "parallel.expert=2: a qwen3 model has no experts"),
    ],
)
def test_layout_that_does_not_fit_names_both_sides(sizes, message):
    with pytest.raises(ConfigError, match=message):
        check_config_layout(hybrid_config("dense", num_groups=1), Layout(**sizes))


def test_context_parallel_ranks_share_heads_by_whole_groups():
    config = hybrid_config("dense", num_heads=12, num_groups=6)
    check_config_layout(config, Layout(context=2))
    with pytest.raises(ConfigError, match=r"does not fit the 12 heads in 6 groups of a .*; use one of \[1, 2,"):
        check_config_layout(config, Layout(context=4))
    with pytest.raises(ConfigError, match=r"the 6 heads in 3 groups .* on each of parallel\.tensor=2 ranks"):
        check_config_layout(config, Layout(tensor=2, context=2))


@pytest.mark.parametrize(
    ("symbol", "message"),
    [
        ("G", r"G \(gated delta net\) is not supported; Megatron .* with flash-linear-attention"),
        ("D", r"D \(sparse attention \(DSA\)\) is not supported; Megatron .* fast-hadamard-transform"),
        ("+", r"the model has no latent attention; write \* for \+"),
    ],
)
def test_layers_that_cannot_be_built_are_refused_by_name(symbol, message):
    config = replace(config_from_hf(tiny_config("llama")), hybrid=HybridLayers(f"*-{symbol}-"))
    with pytest.raises(ConfigError, match=message):
        check_config_layout(config, Layout())


def test_latent_attention_has_a_symbol_of_its_own():
    transformer = replace(config_from_hf(tiny_config("deepseek_v3")), mtp_num_layers=0, num_layers=4)
    moe = replace(transformer.moe, layers=(3,))
    check_config_layout(replace(transformer, moe=moe, hybrid=HybridLayers("+-+E")), Layout())
    with pytest.raises(ConfigError, match=r"the model has latent attention; write \+ for \*"):
        check_config_layout(replace(transformer, moe=moe, hybrid=HybridLayers("*-+E")), Layout())


def test_chunks_are_those_of_the_pattern_and_in_megatrons_words():
    layout = Layout(pipeline=2, virtual_pipeline=2, pipeline_layout="M|*-*-|M*|-*-")
    chunks = chunks_of(hybrid_config("dense"), layout)
    assert [[(c.layers.start, c.layers.stop) for c in rank] for rank in chunks] == [[(0, 1), (5, 7)], [(1, 5), (7, 10)]]
    assert hybrid_split(chunks) == {"pipeline_model_parallel_layout": "Et|tttt|tt|tttL"}
    even = chunks_of(hybrid_config("dense"), Layout(pipeline=2))
    assert hybrid_split(even) == {"pipeline_model_parallel_layout": "Ettttt|tttttL"}


def test_a_proposed_pattern_is_accepted():
    for stages in (2, 3, 4, 5, 7):
        layout = Layout(pipeline=stages, pipeline_layout=proposed_pattern("M*-*-M*-*-", stages))
        assert len(chunks_of(hybrid_config("dense"), layout)) == stages
