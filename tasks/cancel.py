"""Stopping the stages of this process from outside their threads.

Prefect runs some stages in threads, and threads receive no signals. So everything that may wait in a stage (for a child
process, for a lease that another run holds) does it inside a scope, and `cancel_all` ends every scope that is open.
Scopes opened later are not affected: a process may outlive a cancelled run and start another.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tasks.errors import Cancelled

# Re-entrant: `cancel_all` may run in a signal handler that interrupts this very thread.
_lock = threading.RLock()
_open: set["Scope"] = set()


class Scope:
    """A piece of work that can be cancelled."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()

    def check(self) -> None:
        """Raise Cancelled once the scope was cancelled."""
        if self._cancelled.is_set():
            raise Cancelled("the run was cancelled")

    def pause(self, seconds: float) -> None:
        """Sleep, but raise Cancelled as soon as the scope is cancelled."""
        self._cancelled.wait(seconds)
        self.check()

    def cancel(self) -> None:
        """Make the work in this scope stop at its next `check`, and wake its `pause`."""
        self._cancelled.set()


@contextmanager
def scope() -> Iterator[Scope]:
    """A scope that `cancel_all` reaches while the block runs."""
    mine = Scope()
    with _lock:
        _open.add(mine)
    try:
        yield mine
    finally:
        with _lock:
            _open.discard(mine)


def cancel_all() -> None:
    """Cancel every open scope of this process, in whatever thread. Safe in a signal handler."""
    with _lock:
        for each in list(_open):
            each.cancel()
