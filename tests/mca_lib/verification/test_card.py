"""A card says verified only where everything was measured, close and noticed."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mca_lib.errors import CheckpointError
from mca_lib.verification.card import (
    Card,
    Generations,
    LayoutResult,
    Sensitivity,
    markdown,
    read_card,
    write_card,
)
from mca_lib.verification.difference import Measured
from mca_lib.verification.limits import CEILING, Limits

CLOSE, FAR = Measured(480, 1e-5, 1e-12, 1.0), Measured(480, 0.3, 1e-4, 0.9)
RESULT = LayoutResult("TP2", 2, everything=CLOSE, with_loss=CLOSE, tensors=55)
REFUSED = LayoutResult("EP2", 2, refused="parallel.expert=2: a llama model has no experts; use 1")
CARD = Card(
    model_type="llama",
    model="tiny llama",
    parameters=1000,
    versions={"torch": "2.15.0"},
    config_digest="c",
    weights_digest="w",
    sample_tokens=480,
    loss_tokens="answers",
    limits=Limits(),
    own_difference=CLOSE,
    layouts=(RESULT, REFUSED),
    sensitivity=(Sensitivity("one weight off", FAR),),
    unsupported=("`clip_qkv`",),
    generations=Generations(5, 32, 5),
)

WRONG: dict[str, tuple[Card, str]] = {
    "too far": (replace(CARD, layouts=(replace(RESULT, everything=FAR),)), r"max \|Δ\| 0.3"),
    "too far on loss tokens": (replace(CARD, layouts=(replace(RESULT, with_loss=FAR),)), "loss tokens"),
    "too much KL": (replace(CARD, layouts=(replace(RESULT, everything=replace(CLOSE, kl=1e-8)),)), "KL 1e-08"),
    "not a number": (
        replace(CARD, layouts=(replace(RESULT, everything=replace(CLOSE, max_difference=math.nan)),)),
        "nan",
    ),
    "failed": (replace(CARD, layouts=(RESULT, LayoutResult("PP2", 2, failed="rank 1 of 2: ValueError"))), "rank 1"),
    "nothing measured": (replace(CARD, layouts=(REFUSED,)), "no layout"),
    "other bytes": (replace(CARD, layouts=(replace(RESULT, different=("model.norm.weight",)),)), "1 of 55 tensors"),
    "no bytes": (replace(CARD, layouts=(replace(RESULT, tensors=0),)), "no tensors"),
    "another text": (replace(CARD, generations=Generations(5, 32, 4, "Prompt 2 differs.")), "Prompt 2"),
}


def test_a_good_card_is_verified() -> None:
    assert (CARD.problems(), CARD.unnoticed(), CARD.verdict()) == ([], [], "verified")
    assert "**Verified**: at every layout" in markdown(CARD)


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(case: str) -> None:
    card, message = WRONG[case]
    assert len(card.problems()) == 1
    assert card.verdict() == "not verified"
    assert f"**Not verified**: {card.problems()[0]}." in markdown(card)
    assert re.search(message, card.problems()[0])


def test_a_comparison_that_would_pass_a_changed_model_decides_nothing() -> None:
    blunt = replace(CARD, sensitivity=(Sensitivity("one weight off", CLOSE), Sensitivity("the rope", FAR)))
    assert (blunt.problems(), blunt.unnoticed(), blunt.verdict()) == ([], ["one weight off"], "inconclusive")
    assert "would not have noticed one weight off. " in markdown(blunt)
    wrong = replace(blunt, layouts=(replace(RESULT, everything=FAR),))
    assert wrong.verdict() == "not verified"


def test_limits_of_a_users_model_follow_its_noise_and_its_scale_up_to_a_ceiling() -> None:
    """The figures of SmolLM2-135M, and of an untrained model of two layers."""
    deep = Limits.of_noise(Measured(1, 1e-4, 1e-11, 1.0), largest_logit=10.0)
    assert (deep.max_difference, deep.kl) == pytest.approx((4e-4, 4e-11))
    untrained = Limits.of_noise(Measured(1, 2.4e-7, 4e-16, 1.0), largest_logit=0.73)
    assert (untrained.max_difference, untrained.kl) == pytest.approx((1.39e-6, 1.5e-14), rel=0.01)
    assert untrained.exceeded(Measured(1, 4.2e-5, 1.5e-11, 1.0))  # the rope's base 1 % higher
    assert not untrained.exceeded(Measured(1, 2.4e-7, 5.1e-16, 1.0))  # another order of sums
    assert Limits.of_noise(Measured(1, 10.0, 1.0, 1.0), 1.0) == CEILING
    assert Limits.of_noise(Measured(1, math.nan, math.nan, 1.0), math.nan) == CEILING


def test_a_change_that_noise_may_cover_is_shown_and_not_required(tmp_path: Path) -> None:
    card = replace(CARD, sensitivity=(Sensitivity("one weight off", CLOSE, required=False),))
    assert card.verdict() == "verified"
    write_card(card, tmp_path / "card.md")
    assert read_card(tmp_path / "card.md") == card
    assert "| one weight off | 1e-05 | 1e-12 | **no** |" in markdown(card)


def test_a_card_is_read_from_its_document(tmp_path: Path) -> None:
    path = tmp_path / "cards" / "llama.md"
    write_card(CARD, path)
    assert read_card(path) == CARD
    text = path.read_text()
    assert "refused: parallel.expert=2" in text
    assert [p.name for p in path.parent.iterdir()] == ["llama.md"]


def test_what_is_not_a_number_stays_so(tmp_path: Path) -> None:
    broken = WRONG["not a number"][0]
    write_card(broken, tmp_path / "card.md")
    found = read_card(tmp_path / "card.md")
    assert math.isnan(found.layouts[0].everything.max_difference)
    assert len(found.problems()) == 1


def test_a_document_without_a_card_is_named(tmp_path: Path) -> None:
    path = tmp_path / "llama.md"
    path.write_text("# llama\n")
    with pytest.raises(CheckpointError, match=r"llama\.md"):
        read_card(path)
