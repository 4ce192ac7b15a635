"""Checkpoints of models with experts: the same bytes whatever layout wrote them, at whatever layout they are read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mca_lib.checkpoint.digest import checkpoint_digest
from mca_lib.checkpoint.reader import CheckpointReader
from mca_lib.models.config import McaModelConfig
from tests.mca_lib.checkpoint import expert_ranks

VARIANTS = ["mixtral", "qwen3-moe-mixed", "qwen2-moe", "qwen3-next", "deepseek-mtp"]


@pytest.fixture(scope="module")
def sources(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hf")
    ranks(1, expert_ranks.make_sources, directory, VARIANTS, "bfloat16")
    return directory


@pytest.fixture(scope="module")
def converted(ranks: Any, sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written without a model."""
    directory = tmp_path_factory.mktemp("mca")
    ranks(1, expert_ranks.convert_all, sources, VARIANTS, directory)
    return directory


LAYOUTS = {
    "one rank": (1, {}),
    "PP2 with two chunks each": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "TP2 EP2": (4, {"tensor": 2, "expert": 2}),
    "TP2 with whole experts": (2, {"tensor": 2, "expert_tensor": 1}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_digest_does_not_depend_on_who_writes(
    ranks: Any, sources: Path, converted: Path, tmp_path: Path, layout: str
) -> None:
    world_size, sizes = LAYOUTS[layout]
    ranks(world_size, expert_ranks.save_all, sizes, sources, VARIANTS, tmp_path)
    for variant in VARIANTS:
        assert checkpoint_digest(tmp_path / variant) == checkpoint_digest(converted / variant), variant


@pytest.mark.parametrize("layout", ["PP2 with two chunks each", "TP2 EP2"])
def test_checkpoint_loads_bitwise_at_another_layout(ranks: Any, sources: Path, converted: Path, layout: str) -> None:
    world_size, sizes = LAYOUTS[layout]
    reports = ranks(world_size, expert_ranks.load_all, sizes, sources, converted, VARIANTS)
    for variant in VARIANTS:
        stored = {t.name for t in CheckpointReader(converted / variant / "model")}
        names = {re.sub(r"(in_proj|conv1d)\.weight\.\w+$", r"\1.weight", name) for name in stored}
        assert set().union(*(report[variant] for report in reports)) == names  # no tensor escaped the comparison
    assert any(name.startswith("mtp.layers.1.") and name.endswith(".router.expert_bias") for name in names)


def test_export_gives_the_source_back(ranks: Any, sources: Path, converted: Path, tmp_path: Path) -> None:
    ranks(1, expert_ranks.export_all, converted, VARIANTS, tmp_path)
    for variant in VARIANTS:
        before, after = (load_file(d / variant / "model.safetensors") for d in (sources, tmp_path))
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert tensor.dtype == after[name].dtype, name
            assert torch.equal(tensor, after[name]), name
        before, after = (json.loads((d / variant / "config.json").read_text()) for d in (sources, tmp_path))
        assert before == after


def test_copies_of_embedding_and_head_are_known(converted: Path) -> None:
    config = McaModelConfig.from_pretrained(converted / "deepseek-mtp")
    first = config.num_layers
    assert sorted(config.source_copies) == [
        f"model.layers.{first + i}.{name}.weight" for i in (0, 1) for name in ("embed_tokens", "shared_head.head")
    ]


def test_expert_bias_keeps_its_precision_in_training(ranks: Any, sources: Path) -> None:
    """It moves by 0.001 per step, which bfloat16 would round away."""
    assert ranks(1, expert_ranks.bias_after_a_cast, sources / "deepseek-mtp") == [("torch.float32", True)]
