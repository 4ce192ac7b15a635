"""Experts stacked in two tensors of a layer are the same model as experts apart."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mca_lib.converter.export import export_hf
from mca_lib.converter.headers import check_weights
from mca_lib.converter.stream import convert_hf
from mca_lib.models.config import McaModelConfig
from mca_lib.verification.tiny import make_tiny


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("apart"), "qwen3_5_moe_text")


@pytest.fixture(scope="module")
def stacked(apart: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the publisher stores it: the layers' experts stacked, those of multi-token prediction apart."""
    folder = tmp_path_factory.mktemp("stacked")
    (folder / "config.json").write_bytes((apart / "config.json").read_bytes())
    tensors = load_file(apart / "model.safetensors")
    experts = json.loads((apart / "config.json").read_text())["num_experts"]
    for layer in range(4):
        stem = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{stem}.{i}.{name}_proj.weight") for i in range(experts)])
            for name in ("gate", "up", "down")
        )
        tensors |= {f"{stem}.gate_up_proj": torch.cat([gate, up], dim=1), f"{stem}.down_proj": down}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_stacked_experts_make_the_same_checkpoint(apart: Path, stacked: Path, tmp_path: Path) -> None:
    first = convert_hf(apart, tmp_path / "first")
    second = convert_hf(stacked, tmp_path / "second", read_back=True)
    assert first["parts"]["weights"] == second["parts"]["weights"]
    assert first["bytes_read"] == second["bytes_read"]
    export_hf(tmp_path / "second", tmp_path / "exported")
    assert_same_tensors(tmp_path / "exported", apart)


def assert_same_tensors(found: Path, expected: Path) -> None:
    ours, theirs = ({k: v for p in f.glob("*.safetensors") for k, v in load_file(p).items()} for f in (found, expected))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_headers_of_a_stacked_source_are_checked_alike(apart: Path, stacked: Path) -> None:
    configs = [check_weights(McaModelConfig.from_pretrained(folder), folder) for folder in (apart, stacked)]
    assert configs[0] == configs[1]
    assert configs[0].mtp_num_layers == 1
