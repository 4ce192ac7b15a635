"""Names of layouts, and what takes the place of one that a model refuses."""

import pytest

from mca_lib.errors import ConfigError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.layout import Layout
from mca_lib.models.registry import config_from_hf
from mca_lib.verification.layouts import STANDARD, layout_name, parse_layout, ranks_of, refusal, stand_in
from mca_lib.verification.tiny import tiny_config


def llama(**changes: int) -> McaModelConfig:
    return config_from_hf(tiny_config("llama") | changes)


@pytest.mark.parametrize("name", STANDARD)
def test_names_are_read_and_written(name: str) -> None:
    assert layout_name(parse_layout(name)) == name


def test_a_name_may_be_typed_on_any_keyboard() -> None:
    assert parse_layout("tp2xEP4xsp") == Layout(tensor=2, expert=4, sequence_parallel=True)


def test_an_uneven_pipeline_has_a_name_too() -> None:
    assert parse_layout("PP3xFIRST1xLAST4") == Layout(pipeline=3, first_stage_layers=1, last_stage_layers=4)


@pytest.mark.parametrize("name", ["TP", "XP2", "TP0", "VPP2", "SP", "FIRST", ""])
def test_what_is_no_layout_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=repr(name)):
        parse_layout(name)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("one rank", 1),
        ("TP2", 2),
        ("EP2", 2),
        ("PP2×FIRST1", 2),
        ("PP2×EP2", 4),
        ("TP2×EP2", 4),
        ("TP2×ETP1", 2),
        ("TP2×EP2×ETP1", 2),
    ],
)
def test_ranks_are_the_fewest_that_hold_experts_and_the_rest(name: str, ranks: int) -> None:
    assert ranks_of(parse_layout(name)) == ranks


def test_the_reason_is_that_of_the_layout_rules() -> None:
    assert refusal(llama(), parse_layout("TP2")) is None
    assert refusal(llama(), parse_layout("EP2")) == "EP=2: a llama model has no experts; use 1"
    assert "attention heads" in refusal(llama(num_attention_heads=9, num_key_value_heads=3), parse_layout("TP2"))


def test_another_size_stands_in_where_two_does_not_divide() -> None:
    odd = llama(num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=30)
    assert stand_in(odd, parse_layout("TP2")) == Layout(tensor=3)
    assert stand_in(odd, parse_layout("PP2×VPP2")) == Layout(pipeline=2, virtual_pipeline=3)
    assert stand_in(odd, parse_layout("EP2")) is None
