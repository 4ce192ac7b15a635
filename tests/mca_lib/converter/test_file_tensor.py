"""A slice of a tensor in a file reads its bytes and no others, into memory that is there already."""

import errno
import os
from pathlib import Path

import pytest
import torch

from mca_lib.converter.file_tensor import FileTensor, ReadCounter
from mca_lib.errors import ModelError

VALUES = torch.arange(3 * 5 * 4, dtype=torch.float32).view(3, 5, 4)


@pytest.fixture
def tensor(tmp_path: Path) -> FileTensor:
    path = tmp_path / "data"
    path.write_bytes(b"header" + VALUES.numpy().tobytes())
    return FileTensor(path.open("rb"), path, 6, (3, 5, 4), torch.float32, ReadCounter())


@pytest.mark.parametrize(
    "index",
    [
        slice(None),
        slice(1, 3),
        (slice(None), slice(2, 4)),
        (slice(1, 2), slice(0, 5), slice(1, 3)),
        (slice(0, 2), slice(4, 5)),
        slice(2, 2),
        (slice(None), slice(3, 3)),
        slice(-1, None),
    ],
)
def test_slice_is_that_of_the_tensor_and_its_bytes_alone_are_read(tensor: FileTensor, index: object) -> None:
    expected = VALUES[index]
    assert torch.equal(tensor[index], expected)
    assert tensor.counter.bytes == expected.nbytes


def test_destination_may_be_a_strided_part_of_a_larger_tensor(tensor: FileTensor) -> None:
    whole = torch.zeros(3, 9, 8)
    tensor.read_into(whole[:, 2:4, ::2], (slice(None), slice(1, 3)))
    assert torch.equal(whole[:, 2:4, ::2], VALUES[:, 1:3])
    assert whole.count_nonzero() == VALUES[:, 1:3].count_nonzero()


def test_scalar_is_read(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(torch.tensor(7.0).numpy().tobytes())
    file = (tmp_path / "data").open("rb")
    assert FileTensor(file, tmp_path / "data", 0, (), torch.float32, ReadCounter())[()] == 7


@pytest.mark.parametrize("index", [3, slice(0, 4, 2), (slice(None),) * 4, torch.tensor([0])])
def test_other_indices_are_refused(tensor: FileTensor, index: object) -> None:
    with pytest.raises(TypeError, match="slices of step 1"):
        tensor[index]


def test_file_that_shrinks_after_its_header_was_read_is_named(tensor: FileTensor) -> None:
    tensor.path.write_bytes(b"header" + bytes(100))
    with pytest.raises(ModelError, match=rf"{tensor.path}: ends at byte 106, in the middle of a tensor"):
        tensor[:]


def test_destination_of_another_dtype_is_refused(tensor: FileTensor) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        tensor.read_into(torch.empty(3, 5, 4, dtype=torch.bfloat16), slice(None))


@pytest.mark.parametrize(
    "index", [slice(None), slice(1, 3), (slice(None), slice(2, 4)), (slice(0, 2), slice(4, 5)), slice(2, 2)]
)
@pytest.mark.parametrize("refusal", [None, errno.EXDEV], ids=["by the kernel", "by reading and writing"])
def test_runs_copy_the_bytes_of_a_slice(
    tensor: FileTensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: object, refusal: int | None
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(refusal, os.strerror(refusal))

    if refusal:
        monkeypatch.setattr(os, "copy_file_range", refuse)
    with (tmp_path / "copy").open("w+b", buffering=0) as copy:
        position = 3
        for run in tensor.runs(index):
            run.copy_to(copy.fileno(), position)
            position += run.length
    expected = VALUES[index].contiguous().numpy().tobytes()
    assert (tmp_path / "copy").read_bytes()[3:] == expected
    assert tensor.counter.bytes == len(expected)


def test_run_of_a_file_that_shrank_is_an_error_that_names_it(tensor: FileTensor, tmp_path: Path) -> None:
    os.truncate(tensor.path, 20)
    with (
        (tmp_path / "copy").open("wb") as copy,
        pytest.raises(ModelError, match=r"data: ends at byte 20, in the middle"),
    ):
        tensor.runs(slice(None))[0].copy_to(copy.fileno(), 0)
