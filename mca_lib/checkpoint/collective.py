"""What one rank does for all: its result, or its error, reaches every rank, so that none waits for one that failed."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mca_lib.errors import UserError


def from_rank_0[T](compute: Callable[[], T]) -> T:
    """Rank 0's value on every rank, which must pickle. What it raises is raised everywhere."""
    box: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            box[0] = compute()
        except Exception as error:
            failure, box[1] = error, _for_others(error)
    dist.broadcast_object_list(box, src=0)
    if failure is not None:
        raise failure
    if box[1] is not None:
        raise box[1]
    return box[0]


def raise_everywhere(error: BaseException | None) -> None:
    """Raise an error that some rank has on all of them: its own on each rank with one, else that of the lowest."""
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error and _for_others(error))
    if error is not None:
        raise error
    for other in errors:
        if other is not None:
            raise other


def _for_others(error: BaseException) -> Exception:
    """As other ranks raise it: not every error pickles."""
    if isinstance(error, UserError | OSError):
        return error
    return RuntimeError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")


def new_passage(directory: Path) -> str:
    """A new folder beside `directory`, for what ranks write on the way to it; of a name that no one else has."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    return tempfile.mkdtemp(prefix=f"{directory.name}-passage-", dir=directory.parent)
