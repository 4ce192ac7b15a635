"""Models with experts, latent attention and multi-token prediction compute what transformers computes, at every layout.

One rank is among the layouts of `test_parity`.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.mca_lib.models import parity_ranks
from tests.mca_lib.models.layouts import EXPERT_LAYOUTS
from tests.mca_lib.models.test_parity import LOGITS, LOSS, compare
from tests.mca_lib.tiny_models import WITH_EXPERTS

PACKED = ["CP2", "TP2 EP2"]
"""Layouts that cut a packed row in ways of their own."""

ON_FOUR_RANKS = ["qwen2-moe", "deepseek-mtp"]
"""Gated shared experts between dense layers; groups, shared experts, latent attention and multi-token prediction."""


@pytest.fixture(scope="module")
def models(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hf")
    ranks(1, parity_ranks.prepare, directory, WITH_EXPERTS)
    return directory


@pytest.mark.parametrize(
    ("layout", "packed"), [(name, False) for name in EXPERT_LAYOUTS] + [(name, True) for name in PACKED]
)
def test_model_equals_transformers(ranks: Any, models: Path, layout: str, packed: bool) -> None:
    world_size, sizes = EXPERT_LAYOUTS[layout]
    # A pipeline only puts the same layers elsewhere.
    variants = WITH_EXPERTS if world_size == 2 and "pipeline" not in sizes else ON_FOUR_RANKS
    for report in compare(ranks, models, (world_size, sizes), variants, packed):
        assert all(errors.parameters > 10 for errors in report.values()), report


def test_forward_alone_needs_no_sequence_parallelism(ranks: Any, models: Path) -> None:
    for report in ranks(2, parity_ranks.compare, models, WITH_EXPERTS, {"tensor": 2}, False, False):
        for variant, errors in report.items():
            assert 0 < errors.logits <= LOGITS, (variant, errors)
            assert 0 < errors.loss <= LOSS, (variant, errors)


def test_megatron_still_loses_gradients_of_the_rotating_keys(ranks: Any, models: Path) -> None:
    """The reason of `LatentSelfAttention`; when this fails, try without."""
    with_megatrons = parity_ranks.compare_with_megatrons_latent_attention
    layout = EXPERT_LAYOUTS["TP2 with sequence parallel"][1]
    for errors in ranks(2, with_megatrons, models, "deepseek-mtp", layout):
        assert errors.logits <= LOGITS
        assert errors.gradient > 0.1
