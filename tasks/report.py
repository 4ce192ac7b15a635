"""How a stage tells what it is doing. The flow supplies a reporter with bars and artifacts; here is the plain one."""

import logging
from typing import Any, Protocol


class Reporter(Protocol):
    """Receives what a stage has to say. Called from the thread that runs the stage."""

    def progress(self, done: float, total: float | None, **metrics: Any) -> None:
        """`done` of `total` units, None when unknown; `metrics` such as loss, tokens_per_second, unit.

        The first call, 0 of None, says that the stage has begun to compute.
        """

    def info(self, text: str) -> None:
        """One line worth reading."""

    def warning(self, text: str) -> None:
        """One line that the user should read."""


class LogReporter:
    """Writes to the standard logger `mcaflow.<stage>`; progress at DEBUG."""

    def __init__(self, stage: str) -> None:
        self._log = logging.getLogger(f"mcaflow.{stage}")

    def progress(self, done: float, total: float | None, **metrics: Any) -> None:
        self._log.debug("%s of %s %s", done, total, metrics or "")

    def info(self, text: str) -> None:
        self._log.info("%s", text)

    def warning(self, text: str) -> None:
        self._log.warning("%s", text)
