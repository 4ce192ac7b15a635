"""Weights of a Hugging Face directory: damage and contradictions are found from the headers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mca_lib.converter.headers import INDEX_FILE, PICKLE_FILE, SINGLE_FILE
from mca_lib.converter.hf_source import HfSource
from mca_lib.errors import ModelError

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def write_sharded(directory: Path, weight_map: dict[str, str] | None = None) -> None:
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, directory / f"{name}.safetensors")
    index = {"weight_map": weight_map or {n: f"{n}.safetensors" for n in TENSORS}}
    (directory / INDEX_FILE).write_text(json.dumps(index))


def test_slices_come_from_the_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE_FILE)
    source = HfSource(tmp_path)
    assert (source.tensors["a"].shape, source.tensors["b"].dtype) == ((2, 3), "bfloat16")
    assert torch.equal(source.slice("a")[:, 1:2], TENSORS["a"][:, 1:2])


def test_shards_are_found_by_the_index(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    assert torch.equal(HfSource(tmp_path).slice("b")[:], TENSORS["b"])


def test_single_file_goes_before_an_index(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / SINGLE_FILE)
    source = HfSource(tmp_path)
    assert {name: info.shape for name, info in source.tensors.items()} == {"a": (1,)}
    assert source.slice("a")[:].item() == 0


def test_pickled_checkpoint_is_read_too(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / PICKLE_FILE)
    source = HfSource(tmp_path)
    assert source.tensors["b"].dtype == "bfloat16"
    assert torch.equal(source.slice("a")[0:1], TENSORS["a"][0:1])


def test_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    torch.save({"a": Path("x")}, tmp_path / PICKLE_FILE)
    with pytest.raises(ModelError, match=PICKLE_FILE):
        HfSource(tmp_path)


def test_directory_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{tmp_path}: no weights"):
        HfSource(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_truncated_file_is_found_by_its_header(tmp_path: Path, keep: int) -> None:
    path = tmp_path / SINGLE_FILE
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        HfSource(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"missing file b\.safetensors"):
        HfSource(tmp_path)


def test_index_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"a": "a.safetensors", "b": "b.safetensors", "c": "b.safetensors"})
    with pytest.raises(ModelError, match="lacks c"):
        HfSource(tmp_path)


def test_tensor_that_the_index_does_not_know_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    save_file(TENSORS, tmp_path / "b.safetensors")
    with pytest.raises(ModelError, match="holds a, which the index does not know"):
        HfSource(tmp_path)


def test_index_may_not_point_outside(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"a": "../a.safetensors"})
    with pytest.raises(ModelError, match="no file name"):
        HfSource(tmp_path)
