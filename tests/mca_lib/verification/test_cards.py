"""Every family has a card, which is of today's tables, complete and within its limits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mca_lib.models.registry import FAMILIES, config_from_hf
from mca_lib.verification.card import Card, read_card
from mca_lib.verification.families import family_card
from mca_lib.verification.index import write_index
from mca_lib.verification.layouts import STANDARD, parse_layout, refusal
from mca_lib.verification.limits import Limits
from mca_lib.verification.tables import table_digest
from mca_lib.verification.tiny import tiny_config

CARDS = Path(__file__).parents[3] / "docs" / "models"


def card_of(model_type: str) -> Card:
    return read_card(CARDS / f"{model_type}.md")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_card_is_verified_within_the_limits_of_tiny_models(model_type: str) -> None:
    card = card_of(model_type)
    assert card.limits == Limits()
    assert card.verdict() == "verified", card.headline()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_card_is_of_todays_tables(model_type: str) -> None:
    """Else: make cards."""
    card = card_of(model_type)
    assert card.config == tiny_config(model_type)
    assert card.table_digest == table_digest(model_type)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_card_has_every_layout_that_the_model_can_have(model_type: str) -> None:
    card, config = card_of(model_type), config_from_hf(tiny_config(model_type))
    assert [result.layout for result in card.layouts] == list(STANDARD)
    for result in card.layouts:
        assert result.refused == refusal(config, parse_layout(result.layout))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_card_shows_what_is_noticed(model_type: str) -> None:
    card = card_of(model_type)
    assert [s.change.partition(" ")[0] for s in card.sensitivity] == ["one", "the"]
    rotary = config_from_hf(card.config).rotary
    assert card.sensitivity[1].change == (
        "the rope scaling left out" if rotary else "the norms' epsilon twice as large"
    )
    assert card.generations is not None
    assert (card.generations.prompts, card.generations.tokens) == (5, 32)


def test_models_with_experts_are_measured_with_experts_spread() -> None:
    measured = {m: {r.layout for r in card_of(m).layouts if r.everything} for m in FAMILIES}
    for model_type in FAMILIES:
        if (moe := config_from_hf(tiny_config(model_type)).moe) is not None:
            assert {"EP2", "TP2×ETP1", "PP2×EP2"} <= measured[model_type]
            assert "TP2×EP2" in measured[model_type] or moe.bias, "biased experts are not split"


def test_the_index_is_that_of_the_cards(tmp_path: Path) -> None:
    for path in CARDS.glob("*.md"):
        (tmp_path / path.name).write_text(path.read_text())
    write_index(tmp_path)
    assert (tmp_path / "README.md").read_text() == (CARDS / "README.md").read_text()
    assert {path.stem for path in CARDS.glob("*.md")} == {*FAMILIES, "README"}


def test_real_weights_are_verified_down_to_what_they_say() -> None:
    """SmolLM2-135M: 9 heads do not divide by 2, so TP3 stands in for TP2."""
    card = read_card(CARDS / "real" / "SmolLM2-135M-Instruct.md")
    assert card.verdict() == "verified", card.headline()
    assert card.parameters == 134_515_008
    measured = {result.layout: result for result in card.layouts if result.everything}
    assert {"one rank", "TP3", "TP3×SP", "PP2", "PP2×VPP3", "CP2"} <= measured.keys()
    assert all((r.tensors, r.different, r.everything.top1) == (272, (), 1.0) for r in measured.values())
    generations = card.generations
    assert (generations.prompts, generations.tokens, generations.identical) == (5, 32, 5)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_a_card_can_be_generated_again(ranks: Any, model_type: str) -> None:
    """A cheap part of it: rounding may differ between machines, so figures are compared by the limits."""
    written = card_of(model_type)
    card = family_card(model_type, SimpleNamespace(run_ranks=ranks), ("one rank", "TP2"))
    assert card.problems() == []
    for name in ("config_digest", "weights_digest", "table_digest", "sample_tokens", "parameters", "unsupported"):
        assert getattr(card, name) == getattr(written, name), name
    for result, before in zip(card.layouts, written.layouts, strict=False):
        assert (result.layout, result.tensors, result.different) == (before.layout, before.tensors, ())
        assert result.everything.tokens == before.everything.tokens


def test_what_transformers_writes_into_a_config_stays_there() -> None:
    config = tiny_config("phi3")
    config["rope_parameters"]["factor"] = 7.0
    assert "factor" not in tiny_config("phi3")["rope_parameters"]
