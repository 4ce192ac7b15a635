"""A directory that appears whole or not at all: written beside its place, synced, renamed."""

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from mca_lib.checkpoint.sealed import move_into_place
from mca_lib.errors import ConfigError


def require_room_for(target: Path) -> None:
    """Raise ConfigError unless `target` is absent or an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: exists and is not empty; choose another output or remove it")


@contextlib.contextmanager
def published(target: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """A new folder beside `target`, which takes its place when the block ends without an error and goes otherwise.

    Args:
        replace: what is at `target` is replaced as a whole; else it must be absent or an empty folder.

    Raises:
        ConfigError: `target` holds something, and `replace` is false; said before the block runs.
    """
    target = Path(target)
    if not replace:
        require_room_for(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # No dot in what is appended: the store knows by the name up to the last one whose folder this is.
    staging = target.with_name(f"{target.name}-partial-{uuid.uuid4().hex[:8]}")
    staging.mkdir()
    try:
        yield staging
        move_into_place(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
