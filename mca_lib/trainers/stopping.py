"""SIGTERM as a wish: it is remembered, and the trainer answers it at the end of the step."""

import logging
import signal
import sys
import threading
from typing import NoReturn, Self

import torch.distributed as dist

EXIT_ON_SIGTERM = 128 + signal.SIGTERM
log = logging.getLogger(__name__)


class StopRequest:
    """Remembers SIGTERM while it is entered. Signals reach the main thread only; elsewhere nothing is installed."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Self:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._former = signal.signal(signal.SIGTERM, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        if self._main:
            signal.signal(signal.SIGTERM, self._former)

    def _remember(self, *_: object) -> None:
        self.requested = True


def leave_after(step: int, total: int) -> NoReturn:
    """Leave when `checkpoint-<step>` is whole; every rank."""
    log.warning("stopped by SIGTERM after step %d of %d; resumed, it goes on from checkpoint-%d", step, total, step)
    sys.exit(EXIT_ON_SIGTERM)


def leave_if_requested(stop: StopRequest) -> None:
    """Leave when some rank got SIGTERM after the last step; all ranks, when the result is written."""
    requested = [False] * dist.get_world_size()
    dist.all_gather_object(requested, stop.requested)
    if any(requested):
        log.warning("SIGTERM came after the last step; the result is whole")
        sys.exit(EXIT_ON_SIGTERM)
