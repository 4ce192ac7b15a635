"""Shards written tensor by tensor: what the library would write, and nothing left out or written twice."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mca_lib.converter.headers import INDEX_FILE, SINGLE_FILE
from mca_lib.converter.safetensors_writer import ShardedWriter, Slot, parse_size
from mca_lib.errors import ConfigError

TENSORS = {
    "matrix": torch.arange(12.0).reshape(3, 4),
    "half": torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16),  # 6 bytes: what follows is not aligned to 8
    "vector": torch.ones(5, dtype=torch.float16),
}
SLOTS = {name: Slot(tuple(t.shape), t.dtype) for name, t in TENSORS.items()}


def write(directory: Path, *names: str, limit: int = 10**6) -> None:
    with ShardedWriter(directory, SLOTS, limit) as writer:
        for name in names:
            writer.write(name, TENSORS[name])


def test_order_of_writing_does_not_matter(tmp_path: Path) -> None:
    write(tmp_path, *reversed(TENSORS))
    assert [p.name for p in tmp_path.iterdir()] == [SINGLE_FILE]
    found = load_file(tmp_path / SINGLE_FILE)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in TENSORS.items())


def test_tensor_larger_than_a_shard_gets_one_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, *TENSORS, limit=20)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX_FILE,
    ]
    assert load_file(tmp_path / "model-00001-of-00002.safetensors").keys() == {"matrix"}


def test_part_of_a_tensor_is_written_as_the_values_it_shows(tmp_path: Path) -> None:
    with ShardedWriter(tmp_path, {"column": Slot((3,), torch.float32)}, 10**6) as writer:
        writer.write("column", TENSORS["matrix"][:, 1])  # not contiguous
    assert load_file(tmp_path / SINGLE_FILE)["column"].tolist() == [1, 5, 9]


def test_tensor_that_is_left_out_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"never written: \['vector'\]"):
        write(tmp_path, "matrix", "half")


def test_tensor_that_is_written_twice_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="half: written twice"):
        write(tmp_path, "half", "half")


@pytest.mark.parametrize("tensor", [torch.ones(4, 3), torch.ones(3, 4, dtype=torch.bfloat16)])
def test_tensor_that_was_not_planned_so_fails(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="matrix: planned"), ShardedWriter(tmp_path, SLOTS, 10**6) as writer:
        writer.write("matrix", tensor)


def test_sizes_are_decimal_as_in_transformers() -> None:
    assert [parse_size(s) for s in ("5GB", "1.5MB", "20KB")] == [5 * 10**9, 1_500_000, 20_000]


@pytest.mark.parametrize("text", ["5", "GB", "5GiB", "five GB", "infGB", "nanGB", "1e400GB", "0GB", "-1GB", "0.0001KB"])
def test_size_without_a_meaning_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="max_shard_size"):
        parse_size(text)
