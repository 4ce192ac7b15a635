"""Locks that last for moments, as files that the kernel guards; those that last for stages are in `tasks.lease`."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.store import ArtifactStore


@contextmanager
def locked(store: ArtifactStore, path: Path, *, exclusive: bool = True) -> Iterator[None]:
    """Hold the lock file `path`, alone or with others that hold it shared; the kernel frees it at a crash."""
    with store.guard("cannot be written"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)
