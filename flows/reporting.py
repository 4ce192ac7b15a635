"""What a running stage tells: to the terminal of the person who started the run, and to Prefect.

Prefect gets a progress artifact per stage, at most one call every few seconds (each is a request to its server), and
the log lines that matter: of progress one every half minute, evaluations and the last step. A server that does not
answer costs a warning, never the training.
"""

import contextvars
import logging
import time
from collections.abc import Callable
from threading import Lock
from uuid import UUID

from flows.console import current_console, describe_metrics, fraction

_INTERVAL_S = 3.0
"""Seconds between two updates of a progress artifact."""
_LOG_INTERVAL_S = 30.0
"""Seconds between two lines of the run's log about the progress of a stage; a training may make many steps in each."""


class StageReporter:
    """Implements ``tasks.stage.Reporter`` for one stage of one flow run. Safe to call from any thread."""

    def __init__(self, stage: str, logger: logging.Logger | logging.LoggerAdapter) -> None:
        self._stage = stage
        self._logger = logger
        self._console = current_console()
        # Reports come from the thread that watches the child process; Prefect finds the task run in the context.
        self._context = contextvars.copy_context()
        self._lock = Lock()
        self._artifact: UUID | None = None
        self._updated = 0.0
        self._logged = time.monotonic()
        self._started = False
        self._server_answers = True

    def progress(self, done: float, total: float | None, **metrics: object) -> None:
        """``done`` of ``total`` units (None: unknown), with metrics such as ``loss`` or ``tokens_per_second``."""
        note = describe_metrics(metrics)
        self._show_started()
        # Of a training: its evaluations, and the last step.
        keep = "step" in metrics and ("eval_loss" in metrics or done == total)
        if self._console:
            self._console.progress(self._stage, done, total, note, keep=keep)
        with self._lock:
            if keep or time.monotonic() - self._logged >= _LOG_INTERVAL_S:
                self._logged = time.monotonic()
                self._logger.info(f"{fraction(done, total)}  {note}".rstrip())
            if (total is None or done < total) and time.monotonic() - self._updated < _INTERVAL_S:
                return
            self._updated = time.monotonic()
            percent = 100.0 * done / total if total else 0.0
            self._tell_prefect(lambda: self._update_artifact(percent, f"{fraction(done, total)}  {note}".rstrip()))

    def info(self, text: str) -> None:
        """Something worth knowing."""
        self._logger.info(text)
        if self._console:
            self._console.line(f"{self._stage:<9} {text}")

    def warning(self, text: str) -> None:
        """Something that a person should look at."""
        self._logger.warning(text)
        if self._console:
            self._console.line(f"{self._stage:<9} warning: {text}", style="yellow")

    def finished(self, note: str) -> None:
        """The stage has its artifact."""
        self._logger.info(note)
        if self._console:
            self._console.finished(self._stage, note)

    def failed(self, error: BaseException) -> None:
        """The stage has no artifact; stages beside it may still go on."""
        stopped = not isinstance(error, Exception)  # by Ctrl-C, SIGTERM, or because a stage beside it failed
        if self._console:
            self._console.finished(self._stage, "stopped" if stopped else f"failed    {type(error).__name__}")

    def _show_started(self) -> None:
        if self._console and not self._started:
            self._console.started(self._stage)
        self._started = True

    def _update_artifact(self, percent: float, description: str) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        if self._artifact is None:
            self._artifact = create_progress_artifact(percent, key=f"{self._stage}-progress", description=description)
        else:
            update_progress_artifact(self._artifact, percent, description=description)

    def _tell_prefect(self, call: Callable[[], None]) -> None:
        if not self._server_answers:
            return
        try:
            self._context.copy().run(call)
        except Exception as error:
            self._server_answers = False
            self._logger.warning("no further progress artifacts for %s: %s", self._stage, error)
