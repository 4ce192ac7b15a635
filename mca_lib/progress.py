"""Lines for the process that started this one: JSON, appended to the file that `MCAFLOW_PROGRESS` names."""

import json
import logging
import os


class ProgressHandler(logging.Handler):
    """Sends log records on to the parent process as `{"info": ...}` and `{"warning": ...}` lines."""

    def emit(self, record: logging.LogRecord) -> None:
        target = os.environ.get("MCAFLOW_PROGRESS")
        if target:
            kind = "warning" if record.levelno >= logging.WARNING else "info"
            with open(target, "a") as file:
                file.write(json.dumps({kind: record.getMessage()}) + "\n")
