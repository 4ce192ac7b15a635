"""One switch per process that stops every stage: the signal handler or the main thread throws it.

Prefect runs some stages in threads, and threads receive no signals; whatever waits in a stage (a child process, a
lease held by another run) waits on this switch too.
"""

import threading

from tasks.errors import Cancelled

_thrown = threading.Event()


def cancel() -> None:
    """Ask every stage of this process to stop. Holds until `resume`."""
    _thrown.set()


def resume() -> None:
    """Allow stages to run again: for a process that outlives a cancelled run."""
    _thrown.clear()


def raise_if_cancelled() -> None:
    """Raise Cancelled once `cancel` was called."""
    if _thrown.is_set():
        raise Cancelled("the run was cancelled")


def pause(seconds: float) -> None:
    """Sleep, but wake up and raise Cancelled as soon as `cancel` is called."""
    _thrown.wait(seconds)
    raise_if_cancelled()
