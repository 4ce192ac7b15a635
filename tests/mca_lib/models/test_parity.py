"""Every family computes what transformers computes, forward and backward, at every layout."""

from pathlib import Path
from typing import Any

import pytest

from tests.mca_lib.models import parity_ranks
from tests.mca_lib.models.layouts import LAYOUTS
from tests.mca_lib.tiny_models import VARIANTS

# fp32 sums in another order; logits are of order 5, losses of order 5.
LOGITS, LOSS = 1e-4, 1e-4
# Gradients catch what the loss hides: activations of the wrong micro batch, norms that are not summed over ranks.
GRADIENT = 1e-4

ON_SEVERAL_RANKS = [
    "llama",
    "llama-tied",
    "llama-mqa",
    "llama-mlp-bias",
    "qwen3-bias",
    "mistral",
    "qwen2-window",
    "yarn-rope",
]
"""Variants that a layout can treat differently."""

OTHER_SPLITS = [name for name in LAYOUTS if name == "TP2 PP2" or "uneven" in name or "custom" in name]
"""They put the same layers elsewhere: two models, in rows, show whether all is where it belongs."""


@pytest.fixture(scope="module")
def models(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hf")
    ranks(1, parity_ranks.prepare, directory, list(VARIANTS))
    return directory


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in OTHER_SPLITS])
def test_model_equals_transformers(ranks: Any, models: Path, layout: str, packed: bool) -> None:
    variants = list(VARIANTS) if layout == "one rank" else ON_SEVERAL_RANKS
    reports = compare(ranks, models, LAYOUTS[layout], variants, packed)
    assert_parameters(reports, variants)


@pytest.mark.parametrize("layout", OTHER_SPLITS)
def test_model_equals_transformers_however_its_layers_are_split(ranks: Any, models: Path, layout: str) -> None:
    variants = ["llama", "llama-tied"]
    assert_parameters(compare(ranks, models, LAYOUTS[layout], variants, packed=False), variants)


def compare(
    ranks: Any, models: Path, layout: tuple[int, dict[str, Any]], variants: list[str], packed: bool
) -> list[dict[str, parity_ranks.Errors]]:
    """The ranks' reports, when all variants are within the limits."""
    world_size, sizes = layout
    reports = ranks(world_size, parity_ranks.compare, models, variants, sizes, packed)
    for variant in variants:
        errors = [report[variant] for report in reports]
        assert max(e.logits for e in errors) <= LOGITS, (variant, errors)
        assert max(e.loss for e in errors) <= LOSS, (variant, errors)
        assert max(e.gradient for e in errors) <= GRADIENT, (variant, errors)
        assert any(e.logits > 0 for e in errors), "no rank returned logits"
    return reports


def assert_parameters(reports: list[dict[str, parity_ranks.Errors]], variants: list[str]) -> None:
    """A stage may hold the output layer alone; together the ranks hold a model."""
    for variant in variants:
        errors = [report[variant] for report in reports]
        assert all(e.parameters > 0 for e in errors), errors
        assert sum(e.parameters for e in errors) >= 20, errors
