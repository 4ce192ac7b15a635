"""A layout that does not fit the model is refused before anything is allocated, naming the recipe's field."""

import re
from dataclasses import fields
from typing import Any

import pytest

from mca_lib.errors import ConfigError
from mca_lib.models.layout import Layout, size_problems
from mca_lib.models.layout_rules import check_config_layout
from mca_lib.models.registry import check_layout, config_from_hf
from tests.mca_lib.models.test_registry import BASE, BASES


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 4}, r"parallel.tensor=4 .* 6 attention heads; use one of \[1, 2\]"),
        ({"tensor": 3}, r"parallel.tensor=3 .* 2 key/value heads; use one of \[1, 2\]"),
        ({"tensor": 6}, "parallel.tensor=6 .* 2 key/value heads"),
        ({"pipeline": 4}, r"parallel.pipeline=4 .* 6 layers; use one of \[1, 2, 3, 6\]"),
        ({"pipeline": 2, "virtual_pipeline": 2}, r"virtual_pipeline=4 .* 6 layers"),
        ({"virtual_pipeline": 2}, "parallel.virtual_pipeline=2 needs parallel.pipeline"),
        ({"sequence_parallel": True}, "parallel.sequence_parallel needs parallel.tensor"),
        ({"expert": 2}, "parallel.expert=2"),
    ],
)
def test_layout_that_does_not_fit_names_both_sides(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layout(BASE, Layout(**sizes))


NUMBERS = {field.name for field in fields(Layout)} - {"sequence_parallel", "pipeline_layout"}


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_size_of_less_than_one_is_named(name: str, size: int) -> None:
    layout = Layout(**{"pipeline": 2, name: size})
    message = rf"^parallel\.{name}: {size} is too small; it must be at least 1$"
    with pytest.raises(ConfigError, match=message):
        check_layout(BASE, layout)
    assert re.search(message, next(size_problems(layout)))


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"pipeline": 3, "virtual_pipeline": 2, "tensor": 2}])
def test_layout_that_fits_is_accepted(sizes: dict[str, Any]) -> None:
    check_layout(BASE, Layout(**sizes))


def test_ranks_may_share_a_key_value_head() -> None:
    check_layout({**BASE, "num_attention_heads": 8, "head_dim": 8}, Layout(tensor=4))


def test_mlp_that_does_not_divide_is_named() -> None:
    with pytest.raises(ConfigError, match="MLP size 97"):
        check_layout({**BASE, "intermediate_size": 97}, Layout(tensor=2))


MOE = BASES["qwen3_moe"] | {"num_key_value_heads": 6, "head_dim": 8}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"expert": 3}, r"parallel.expert=3 does not divide the model's 4 experts; use one of \[1, 2, 4\]"),
        ({"tensor": 3, "sequence_parallel": True}, "parallel.tensor=3 does not divide the model's expert size 16"),
        ({"expert_tensor": 3}, "parallel.expert_tensor=3 does not divide the model's expert size 16"),
        ({"tensor": 2}, "parallel.tensor=2 with experts needs parallel.sequence_parallel: true in training"),
        ({"pipeline": 4}, "parallel.last_stage_layers|parallel.pipeline_layout"),
    ],
)
def test_layout_that_does_not_fit_the_experts_is_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layout(MOE, Layout(**sizes))


@pytest.mark.parametrize(
    "sizes",
    [
        {"expert": 4},
        {"tensor": 3, "expert_tensor": 1, "sequence_parallel": True},
        {"tensor": 2, "expert": 2, "expert_tensor": 4, "sequence_parallel": True, "context": 2},
    ],
)
def test_layout_that_fits_the_experts_is_accepted(sizes: dict[str, Any]) -> None:
    check_layout(MOE, Layout(**sizes))


def test_experts_without_sequence_parallelism_are_fine_where_nothing_is_trained() -> None:
    check_config_layout(config_from_hf(MOE), Layout(tensor=2))


def test_shared_expert_that_does_not_divide_is_named() -> None:
    hf = BASES["qwen2_moe"] | {"shared_expert_intermediate_size": 25}
    with pytest.raises(ConfigError, match="shared expert size 25"):
        check_layout(hf, Layout(tensor=2, sequence_parallel=True))


def test_dense_model_has_no_expert_sizes() -> None:
    with pytest.raises(ConfigError, match=r"parallel.expert_tensor=2: a llama model has no experts"):
        check_layout(BASE, Layout(expert_tensor=2))


def test_pipeline_rules_are_asked_too() -> None:
    with pytest.raises(ConfigError, match="must hold E, 6 t and L"):
        check_layout(BASE, Layout(pipeline=2, pipeline_layout="Et|t*4L"))
    check_layout(BASE, Layout(pipeline=2, pipeline_layout="Et|t*5L"))
