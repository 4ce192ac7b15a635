"""Which layers a pipeline rank holds: those that Megatron builds, and refused by field where they do not fit."""

import re
from typing import Any

import pytest

from mca_lib.errors import ConfigError
from mca_lib.models.layout import Layout
from mca_lib.models.pipeline import parse_layout, pipeline_chunks, proposed_layout

SPLITS = {
    "equal": (8, Layout(pipeline=2)),
    "interleaved": (8, Layout(pipeline=2, virtual_pipeline=2)),
    "short first rank": (8, Layout(pipeline=3, first_stage_layers=2)),
    "short last rank": (7, Layout(pipeline=4, last_stage_layers=1)),
    "both": (9, Layout(pipeline=4, first_stage_layers=2, last_stage_layers=3)),
    "both of two": (5, Layout(pipeline=2, first_stage_layers=2, last_stage_layers=3)),
    "interleaved, short last rank": (10, Layout(pipeline=3, virtual_pipeline=2, last_stage_layers=2)),
    "interleaved, both of two": (
        6,
        Layout(pipeline=2, virtual_pipeline=2, first_stage_layers=2, last_stage_layers=4),
    ),
    "custom": (8, Layout(pipeline=2, pipeline_layout="Et*3|t*5,L")),
    "custom and interleaved": (8, Layout(pipeline=2, virtual_pipeline=2, pipeline_layout="E t|(tt|)*2tttL")),
    "custom with an empty chunk": (8, Layout(pipeline=2, virtual_pipeline=2, pipeline_layout="E|t*5||t*3L")),
}


def megatron_layers(num_layers: int, layout: Layout) -> list[list[list[int]]]:
    """Layers of every chunk of every pipeline rank, from Megatron's own functions."""
    from types import SimpleNamespace
    from unittest.mock import patch

    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from mca_lib.models.layout import virtual_stages
    from mca_lib.models.pipeline import megatron_split

    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=virtual_stages(layout),
        pipeline_dtype=__import__("torch").float32,
        **megatron_split(layout),
    )
    found = []
    for rank in range(layout.pipeline):
        place = SimpleNamespace(rank=rank)
        with (
            patch.object(parallel_state, "get_pipeline_model_parallel_rank", lambda place=place: place.rank),
            patch.object(
                parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: virtual_stages(layout)
            ),
        ):
            stages = range(layout.virtual_pipeline) if virtual_stages(layout) else [None]
            starts = [get_transformer_layer_offset(config, stage, rank) for stage in stages]
            counts = [get_num_layers_to_build(config, stage, rank) for stage in stages]
        found.append([list(range(s, s + n)) for s, n in zip(starts, counts, strict=True)])
    return found


@pytest.mark.parametrize("split", SPLITS)
def test_ranks_hold_the_layers_that_megatron_builds(ranks: Any, split: str) -> None:
    num_layers, layout = SPLITS[split]
    chunks = pipeline_chunks(num_layers, 0, layout)
    ours = [[list(chunk.layers) for chunk in rank] for rank in chunks]
    assert [ours] == ranks(1, megatron_layers, num_layers, layout)
    assert sorted(i for rank in ours for chunk in rank for i in chunk) == list(range(num_layers))
    assert [c.embedding for rank in chunks for c in rank].index(True) == 0
    assert chunks[-1][-1].head
    assert sum(c.head for rank in chunks for c in rank) == 1


def test_multi_token_prediction_is_in_the_last_chunk() -> None:
    layout = Layout(pipeline=2, virtual_pipeline=2, pipeline_layout="Et|tt|t|mL")
    chunks = pipeline_chunks(4, 1, layout)
    assert [[c.mtp_layers for c in rank] for rank in chunks] == [[0, 0], [0, 1]]


REFUSED = {
    "layers that do not divide": (
        Layout(pipeline=3),
        "parallel.pipeline=3 does not divide the model's 8 layers; use one of [1, 2, 4, 8], or set "
        "parallel.last_stage_layers: 2",
    ),
    "layers that do not divide by the chunks": (
        Layout(pipeline=3, virtual_pipeline=2),
        "parallel.pipeline x parallel.virtual_pipeline=6 does not divide the model's 8 layers; use one of [1, 2, 4, 8]"
        ", or write parallel.pipeline_layout: Et|t|t*2|t*2|t|tL",
    ),
    "more ranks than layers": (Layout(pipeline=16), "parallel.pipeline=16 does not divide the model's 8 layers"),
    "chunks without a pipeline": (
        Layout(virtual_pipeline=2),
        "parallel.virtual_pipeline=2 needs parallel.pipeline > 1",
    ),
    "a first rank without a pipeline": (
        Layout(first_stage_layers=2),
        "parallel.first_stage_layers needs parallel.pipeline > 1",
    ),
    "a first rank that leaves too few": (
        Layout(pipeline=2, first_stage_layers=8),
        "parallel.first_stage_layers=8 leave 0 of the model's 8 layers",
    ),
    "ranks between that do not divide": (
        Layout(pipeline=4, first_stage_layers=1, last_stage_layers=2),
        "parallel.first_stage_layers=1, parallel.last_stage_layers=2 leave 5 of the model's 8 layers, which do not "
        "divide by the other 2 ranks of parallel.pipeline",
    ),
    "two ranks that do not add up": (
        Layout(pipeline=2, first_stage_layers=3, last_stage_layers=4),
        "parallel.first_stage_layers=3, parallel.last_stage_layers=4 do not add up to the model's 8 layers",
    ),
    "a last rank that does not divide into chunks": (
        Layout(pipeline=3, virtual_pipeline=2, last_stage_layers=3),
        "parallel.last_stage_layers=3 does not divide by parallel.virtual_pipeline=2",
    ),
    "two ways to split": (
        Layout(pipeline=2, first_stage_layers=3, pipeline_layout="Et*3|t*5L"),
        "cannot go with parallel.first_stage_layers",
    ),
    "a layout without a pipeline": (Layout(pipeline_layout="Et*8L"), "needs parallel.pipeline > 1"),
    "a layout of too many chunks": (
        Layout(pipeline=2, pipeline_layout="Et*2|t*2|t*2|t*2L"),
        "has 4 chunks, and parallel.pipeline=2 x parallel.virtual_pipeline=1 is 2; set parallel.virtual_pipeline: 2",
    ),
    "a layout of other layers": (Layout(pipeline=2, pipeline_layout="Et*3|t*4L"), "must hold E, 8 t and L"),
    "a layout that loses the embedding": (Layout(pipeline=2, pipeline_layout="t*3|t*5L"), "as Et*4|t*4L"),
    "a layout whose first chunk is empty": (
        Layout(pipeline=2, virtual_pipeline=2, pipeline_layout="|Et*3|t|t*4L"),
        "E in the first chunk",
    ),
    "a layout with layers that the model lacks": (Layout(pipeline=2, pipeline_layout="Et*3|t*5mL"), "must hold E, 8 t"),
    "a letter that means nothing": (Layout(pipeline=2, pipeline_layout="Et*3|x*5L"), "has 'x'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_split_that_does_not_fit_is_refused_by_its_field(case: str) -> None:
    layout, message = REFUSED[case]
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        pipeline_chunks(8, 0, layout)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("layers", range(2, 30))
@pytest.mark.parametrize("stages", [2, 3, 4, 6])
def test_proposed_layout_is_accepted(layers: int, stages: int) -> None:
    chunks = pipeline_chunks(layers, 1, Layout(pipeline=stages, pipeline_layout=proposed_layout(layers, stages, 1)))
    sizes = [len(c.layers) for rank in chunks for c in rank]
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("text", ["Et*3|(tt|)*3,t*2L", "Et|(tt|)*29,m|L", "E|t*2||mL"])
def test_notation_is_megatrons(ranks: Any, text: str) -> None:
    assert ranks(1, megatron_notation, text) == [parse_layout(text)]


def megatron_notation(text: str) -> list[str]:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    chunks = PipelineParallelLayerLayout.parse_str_to_list(text)
    return ["".join(letters[layer.name] for layer in chunk) for chunk in chunks]
