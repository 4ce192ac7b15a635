"""Hybrid models are built as their tables say, and their checkpoints do not depend on the layout."""

from math import prod
from typing import Any

import pytest

from mca_lib.checkpoint.digest import weights_digest
from mca_lib.checkpoint.reader import CheckpointReader
from mca_lib.checkpoint.verify import expected_shapes
from mca_lib.converter.plan import entries
from mca_lib.models import size
from mca_lib.models.layout import Layout
from tests.mca_lib.models.hybrid.configs import HYBRIDS, hybrid_config
from tests.mca_lib.models.hybrid.model_ranks import build, logits_beside_the_transformer, save_again
from tests.mca_lib.tiny_models import save_hf

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2 SP": (2, {"tensor": 2, "sequence_parallel": True}),
    "PP2 VPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "EP2": (2, {"expert": 2}),
}


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Random hybrids, made and saved by four ranks."""
    folder = tmp_path_factory.mktemp("hybrids")
    ranks(4, build, list(HYBRIDS), {"tensor": 2, "pipeline": 2, "sequence_parallel": True}, folder)
    return folder


@pytest.mark.parametrize("name", HYBRIDS)
def test_checkpoint_holds_what_the_table_says(saved, name):
    config = hybrid_config(name)
    stored = CheckpointReader(saved / name / "model").stored
    assert {key: tuple(meta.size) for key, meta in stored.items()} == expected_shapes(config)
    assert sum(prod(meta.size) for meta in stored.values()) == size.total(config)


def test_one_rank_has_a_parameter_for_every_row_of_the_table(ranks):
    ((held),) = ranks(1, build, list(HYBRIDS), {})
    for name in HYBRIDS:
        config = hybrid_config(name)
        assert held[name] == {e.mca: e.mapping.local_shape(config, 0, 1) for e in entries(config)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_is_the_same_bits_after_any_layout(ranks, saved, tmp_path, layout):
    world_size, sizes = LAYOUTS[layout]
    names = ["experts"] if "expert" in sizes else ["dense", "experts"]
    if "virtual_pipeline" in sizes:
        names = ["without Mamba"]  # the others have no four equal chunks
    ranks(world_size, save_again, saved, tmp_path, names, sizes)
    for name in names:
        assert weights_digest(tmp_path / name / "model") == weights_digest(saved / name / "model")


@pytest.mark.parametrize("layout", [Layout(tensor=2, sequence_parallel=True), Layout(pipeline=2)])
def test_a_rank_holds_what_the_table_says(ranks, layout):
    held = ranks(2, build, ["dense", "experts"], {k: v for k, v in vars(layout).items() if v})
    for rank, tensors in enumerate(held):
        place = (0, rank, rank) if layout.tensor == 2 else (rank, 0, 0)
        for name, shapes in tensors.items():
            expected = sum(size.local_parts(hybrid_config(name), layout, *place).values())
            assert sum(map(prod, shapes.values())) == expected, name


@pytest.mark.parametrize(
    ("variant", "pattern"),
    [("qwen3", "M*-*-MM*-*-"), ("mistral-full", "*-M*-*-*-M"), ("qwen3-moe", "M*E*E*E*E"), ("llama3-rope", "*-*-*-*-")],
)
def test_with_silent_mamba_layers_the_logits_are_the_transformers(ranks, tmp_path, variant, pattern):
    """Families' switches: norms of queries and keys, experts, scaled positions."""
    ranks(1, save_hf, tmp_path / "model", variant)
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_state_size": 8} if "M" in pattern else {}
    ((difference, largest),) = ranks(1, logits_beside_the_transformer, tmp_path / "model", pattern, sizes)
    assert largest > 0.5
    assert difference <= 1e-6 * largest  # measured: 0 in each of the four
