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

SPLIT = [
    *("llama", "llama-tied", "llama-mqa", "llama-mlp-bias", "qwen3-bias", "mistral", "qwen2-window", "qwen3.5"),
    "yarn-rope",
    "phi3-longrope",
]
"""Variants whose weights tensor parallel ranks cut in different ways."""

BY_LAYER = ["llama", "llama-tied", "qwen2-window"]
"""A pipeline only puts layers elsewhere: what shows where they are is tied ends, and layers that differ."""

BY_POSITION = ["llama", "llama-mqa", "qwen2-window", "qwen3.5", "yarn-rope"]
"""Context parallel ranks have other positions, and keys and values of each other."""

ROWS = [
    *(("one rank", packed, list(VARIANTS)) for packed in (False, True)),
    ("TP2", False, SPLIT),
    ("TP2", True, ["llama"]),
    ("TP2 with sequence parallel", False, ["llama"]),
    ("TP2 with sequence parallel", True, SPLIT),
    *((name, False, BY_LAYER) for name in ("PP2", "PP2 with two chunks each")),
    *((name, True, ["qwen2-window"]) for name in ("PP2", "PP2 with two chunks each")),
    *(("CP2", packed, BY_POSITION) for packed in (False, True)),
]
"""Layout, whether rows are packed, variants. Each variant costs in each row: a row has those that it may treat in a way
of their own. A new family belongs into `VARIANTS`, and where ranks cut its layers differently, into `SPLIT`."""

OTHER_SPLITS = [name for name in LAYOUTS if name not in {row[0] for row in ROWS}]
"""They put the same layers elsewhere: two models, in rows, show whether all is where it belongs."""


@pytest.fixture(scope="module")
def models(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hf")
    ranks(1, parity_ranks.prepare, directory, list(VARIANTS))
    return directory


@pytest.mark.parametrize(("layout", "packed", "variants"), ROWS, ids=[f"{r[0]} {'packed' * r[1]}" for r in ROWS])
def test_model_equals_transformers(ranks: Any, models: Path, layout: str, packed: bool, variants: list[str]) -> None:
    assert_parameters(compare(ranks, models, LAYOUTS[layout], variants, packed), variants)


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
