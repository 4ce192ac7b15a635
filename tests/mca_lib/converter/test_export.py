"""Hugging Face → MCA → Hugging Face: the same bytes under the same names, in a directory that transformers loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mca_lib.checkpoint.digest import checkpoint_digest
from mca_lib.converter.export import export_hf
from mca_lib.converter.hf_source import HfSource
from mca_lib.errors import CheckpointError, ConfigError
from tests.mca_lib.converter import export_ranks
from tests.mca_lib.models import factory_ranks


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in sorted(directory.glob("*.safetensors")) for n, t in load_file(file).items()}


def assert_same_tensors(a: Path, b: Path) -> None:
    first, second = tensors(a), tensors(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


@pytest.fixture(scope="module")
def source(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "hf"
    ranks(1, export_ranks.make_source, directory, "llama")
    return directory


@pytest.fixture(scope="module")
def checkpoint(ranks: Any, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "mca"
    ranks(1, export_ranks.convert, source, directory)
    return directory


@pytest.mark.parametrize("variant", ["llama-tied", "llama-bias", "llama-mqa", "qwen2", "qwen3-bias", "llama3-rope"])
def test_round_trip_is_bitwise(ranks: Any, tmp_path: Path, variant: str) -> None:
    ranks(1, export_ranks.make_source, tmp_path / "hf", variant)
    ranks(1, export_ranks.convert, tmp_path / "hf", tmp_path / "mca")
    export_hf(tmp_path / "mca", tmp_path / "back")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


def test_exported_directory_is_self_sufficient(ranks: Any, source: Path, checkpoint: Path, tmp_path: Path) -> None:
    result = export_hf(checkpoint, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in source.iterdir()) == result["files"]
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    (ours,), (theirs,) = (ranks(1, export_ranks.logits_of, d) for d in (tmp_path, source))
    assert (ours == theirs).all()


def test_shards_are_named_and_indexed_as_transformers_does(
    ranks: Any, source: Path, checkpoint: Path, tmp_path: Path
) -> None:
    result = export_hf(checkpoint, tmp_path, max_shard_size="20KB")
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 3
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found = tensors(tmp_path)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values()) == result["bytes"]
    assert index["metadata"]["total_parameters"] == sum(t.numel() for t in found.values())
    assert index["weight_map"].keys() == found.keys()
    assert HfSource(tmp_path).tensors.keys() == found.keys()
    assert all(p.stat().st_size < 24_000 for p in tmp_path.glob("*.safetensors"))
    assert_same_tensors(source, tmp_path)
    (ours,), (theirs,) = (ranks(1, export_ranks.logits_of, d) for d in (tmp_path, source))
    assert (ours == theirs).all()


def test_export_from_several_ranks_is_bitwise(ranks: Any, source: Path, tmp_path: Path) -> None:
    ranks(4, factory_ranks.export_at, {"tensor": 2, "pipeline": 2}, source, tmp_path)
    assert_same_tensors(source, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in source.iterdir())


def test_changed_weights_are_what_is_exported(ranks: Any, source: Path, tmp_path: Path) -> None:
    ranks(1, factory_ranks.train_a_little, source, tmp_path / "mca")
    export_hf(tmp_path / "mca", tmp_path / "hf")
    before, after = tensors(source), tensors(tmp_path / "hf")
    for name, tensor in before.items():
        assert torch.equal(after[name], (tensor.float() * 1.5).bfloat16()), name


def test_every_tensor_keeps_its_own_dtype(ranks: Any, tmp_path: Path) -> None:
    ranks(1, export_ranks.make_source, tmp_path / "hf", "llama")
    ranks(1, export_ranks.mix_dtypes, tmp_path / "hf")
    ranks(1, export_ranks.convert, tmp_path / "hf", tmp_path / "mca")
    export_hf(tmp_path / "mca", tmp_path / "back")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


def test_dtype_that_is_asked_for_is_written_and_declared(checkpoint: Path, tmp_path: Path) -> None:
    export_hf(checkpoint, tmp_path, dtype="float32")
    assert {t.dtype for t in tensors(tmp_path).values()} == {torch.float32}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(("field", "value"), [("dtype", "int8"), ("max_shard_size", "5 gigs")])
def test_wrong_option_is_named(checkpoint: Path, tmp_path: Path, field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=field):
        export_hf(checkpoint, tmp_path, **{field: value})


def test_directory_that_is_no_checkpoint_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no mca_config\.json"):
        export_hf(source, tmp_path)


def test_digest_survives_the_round_trip(ranks: Any, checkpoint: Path, tmp_path: Path) -> None:
    export_hf(checkpoint, tmp_path / "hf", max_shard_size="50KB")
    ranks(1, export_ranks.convert, tmp_path / "hf", tmp_path / "again")
    assert checkpoint_digest(tmp_path / "again") == checkpoint_digest(checkpoint)
