"""Conditions of a promotion: what they compare, and what is no condition."""

import math

import pytest

from mca_lib.errors import ConfigError
from tasks.gate import parse_condition

TRAINED = {"heldout_loss": 1.5, "arc_easy.acc": 0.4, "nan": math.nan}
OTHERS = {"production": {"heldout_loss": 1.505, "nan": 1.0}, "base": {"heldout_loss": 1.7}}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("heldout_loss < production", True),
        ("heldout_loss < production - 0.01", False),
        ("heldout_loss <= base * 0.9", True),
        ("heldout_loss < 0.5 * base", False),
        ("heldout_loss > -1", True),
        ("arc_easy.acc >= 0.4", True),
        ("arc_easy.acc > 0.4", False),
        ("nan < 5", False),
    ],
)
def test_a_condition_holds_or_says_by_how_much_it_does_not(text: str, holds: bool) -> None:
    failure = parse_condition(text).failure(TRAINED, OTHERS)
    assert (failure is None) == holds
    assert holds or failure.startswith(text + ":")


def test_before_the_first_promotion_conditions_against_production_hold() -> None:
    others = {"production": None, "base": {"heldout_loss": 1.0}}
    assert parse_condition("heldout_loss < production - 1").failure(TRAINED, others) is None
    assert parse_condition("heldout_loss < base").failure(TRAINED, others) == (
        "heldout_loss < base: heldout_loss is 1.5, and it must be < 1"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no condition"),
        ("heldout_loss", "no condition"),
        ("heldout_loss == 1", "no condition"),
        ("0 < heldout_loss < 1", "no condition"),
        ("1 < heldout_loss", "a measure goes on the left"),
        ("production < heldout_loss", "a measure goes on the left"),
        ("heldout_loss < other", "cannot stand on the right"),
        ("heldout_loss < __import__('os').system('true')", "cannot stand on the right"),
        ("heldout_loss < 'a'", "cannot stand on the right"),
        ("heldout_loss < production / 2", "cannot stand on the right"),
        ("heldout_loss < True", "cannot stand on the right"),
    ],
)
def test_anything_else_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_condition(text)


def test_a_measure_that_was_not_taken_is_named() -> None:
    with pytest.raises(ConfigError, match=r"arc was not measured of the trained model; measured: arc_easy.acc, held"):
        parse_condition("arc > 0").failure(TRAINED, OTHERS)
    with pytest.raises(ConfigError, match="was not measured of production"):
        parse_condition("arc_easy.acc > production").failure(TRAINED, OTHERS)
