"""Lines for the process that started this one: JSON, appended to the file that `MCAFLOW_PROGRESS` names."""

import json
import logging
import os

from mca_lib.checkpoint.sealed import naming


def tell(kind: str, text: str) -> None:
    """Send a line of `kind` info or warning to the parent process, where there is one that listens."""
    target = os.environ.get("MCAFLOW_PROGRESS")
    if target:
        with naming(target), open(target, "a") as file:
            file.write(json.dumps({kind: text}) + "\n")


class ProgressHandler(logging.Handler):
    """Sends log records on to the parent process as `{"info": ...}` and `{"warning": ...}` lines."""

    def emit(self, record: logging.LogRecord) -> None:
        tell("warning" if record.levelno >= logging.WARNING else "info", record.getMessage())
