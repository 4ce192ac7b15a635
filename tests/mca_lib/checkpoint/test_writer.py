"""The writer of torch_dist checkpoints: what torch and the reader find is what was given, and gaps are refused."""

from pathlib import Path

import pytest
import torch

from mca_lib.checkpoint.reader import CheckpointReader
from mca_lib.checkpoint.writer import Piece, write_checkpoint
from mca_lib.errors import CheckpointError

KEY = "decoder.layers.weight"
VALUES = torch.arange(24.0).view(3, 2, 4)
PIECES = [Piece(f"decoder.layers.{i}.weight", KEY, (i,), (3, 2, 4), torch.float32) for i in range(3)]


def make(piece: Piece) -> torch.Tensor:
    return VALUES[piece.index]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_what_is_written_is_read_back(tmp_path: Path, workers: int) -> None:
    write_checkpoint(tmp_path / "model", PIECES, make, workers=workers)
    reader = CheckpointReader(tmp_path / "model")
    assert [t.name for t in reader] == [p.name for p in PIECES]
    for piece in PIECES:
        assert torch.equal(reader.read(piece.name), VALUES[piece.index])


def test_torch_loads_it_as_one_tensor(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader, load

    write_checkpoint(tmp_path / "model", PIECES, make, workers=2)
    state = {KEY: torch.zeros(3, 2, 4)}
    load(state, storage_reader=FileSystemReader(tmp_path / "model"), no_dist=True)
    assert torch.equal(state[KEY], VALUES)


def test_piece_of_a_larger_storage_is_written_alone(tmp_path: Path) -> None:
    """`torch.save` of a view writes all of what it is a view of."""
    large = torch.zeros(1_000_000)
    piece = Piece("a", "a", (), (8,), torch.float32)
    write_checkpoint(tmp_path / "model", [piece], lambda _: large[:8])
    assert (tmp_path / "model" / "__0_0.distcp").stat().st_size < 10_000


@pytest.mark.parametrize("pieces", [PIECES[:2], [*PIECES[:2], PIECES[0]]], ids=["gap", "twice"])
def test_pieces_that_do_not_make_their_key_are_refused_before_writing(tmp_path: Path, pieces: list[Piece]) -> None:
    with pytest.raises(ValueError, match=r"pieces of 16 elements for 24|the same part"):
        write_checkpoint(tmp_path / "model", pieces, make)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("tensor", [torch.zeros(2, 5), torch.zeros(2, 4, dtype=torch.int32), torch.zeros(4, 2).t()])
def test_tensor_that_is_not_what_was_planned_is_refused(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"decoder\.layers\.\d\.weight: planned"):
        write_checkpoint(tmp_path / "model", PIECES, lambda _: tensor)


def test_error_in_the_middle_leaves_no_whole_checkpoint(tmp_path: Path) -> None:
    def fail_at_the_last(piece: Piece) -> torch.Tensor:
        if piece is PIECES[-1]:
            raise OSError("the disk is gone")
        return make(piece)

    with pytest.raises(OSError, match="the disk is gone"):
        write_checkpoint(tmp_path / "model", PIECES, fail_at_the_last, workers=2)
    with pytest.raises(CheckpointError, match=r"metadata\.json is missing"):
        CheckpointReader(tmp_path / "model")
