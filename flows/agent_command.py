"""``mcaflow agent``: this machine's part of a run on several."""

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from mca_lib.errors import ConfigError
from mca_lib.launch_plan import split_endpoint
from tasks.process import CommandFailed, run_command

# Longer than torchrun gives its ranks.
_GRACE_SECONDS = 40.0


def take_part(endpoint: str, *, keep: bool) -> None:
    """Join the run at an endpoint, under a guardian; exits with the run's status."""
    try:
        split_endpoint(endpoint)
    except ValueError as error:
        raise ConfigError(f"mcaflow agent: {error}") from None
    signal.signal(signal.SIGTERM, _terminated)
    command = [sys.executable, "-m", "mca_lib.nodes", "join", endpoint, *(["--keep"] if keep else [])]
    with tempfile.TemporaryDirectory(prefix="mcaflow-agent-") as folder:
        try:
            run_command(
                command,
                tag=f"agent-{os.path.basename(folder)}",
                log_path=Path(folder) / "agent.log",
                # What torch says of a connection that closes is known.
                env={"TORCH_CPP_LOG_LEVEL": "FATAL"},
                on_line=lambda line: print(line, flush=True),
                grace=_GRACE_SECONDS,
            )
        except CommandFailed as error:
            sys.exit(error.status)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)


def _terminated(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)
