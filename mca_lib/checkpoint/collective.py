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
            failure = error
            # Others may not pickle.
            plain = isinstance(error, UserError | OSError)
            box[1] = error if plain else RuntimeError(f"rank 0: {type(error).__name__}: {error}")
    dist.broadcast_object_list(box, src=0)
    if failure is not None:
        raise failure
    if box[1] is not None:
        raise box[1]
    return box[0]


def new_passage(directory: Path) -> str:
    """A new folder beside `directory`, for what ranks write on the way to it; of a name that no one else has."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    return tempfile.mkdtemp(prefix=f"{directory.name}-passage-", dir=directory.parent)
