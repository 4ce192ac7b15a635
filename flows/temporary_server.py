"""The temporary Prefect server of a run on the command line.

Prefect would start one by itself, with four flaws (3.9): it outlives a run that is killed; Ctrl-C in a terminal reaches
it as well, so that the run can no longer tell it how it ended; it has 20 seconds to start, which a busy machine does
not make; and it starts only after this process has imported Prefect, which takes as long. So the process is started
here, without Prefect, below a guardian that ends it with this process; `adopt` gives it to Prefect.
"""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mca_lib.errors import ConfigError
from tasks import guardian

STARTUP_SECONDS = 180


@dataclass(frozen=True)
class Starting:
    """A server that was started and does not answer yet."""

    process: subprocess.Popen
    port: int


def start(home: Path) -> Starting:
    """Start a server with its database in `home`, for the settings of the environment.

    To be called in the main thread: the guardian's parent is a thread.

    Raises:
        ConfigError: `home` cannot be written.
    """
    _require_writable(home)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return Starting(_spawn(port), port)


def adopt(starting: Starting) -> None:
    """Wait until it answers; Prefect then finds it in its own registry, and stops it at the end.

    Raises:
        RuntimeError: it does not start.
    """
    from prefect.server.api.server import SubprocessASGIServer

    class TemporaryServer(SubprocessASGIServer):
        def _run_uvicorn_command(self) -> subprocess.Popen:
            # A second call means that somebody else has taken the port meanwhile.
            return starting.process if self.port == starting.port else _spawn(self.port)

    server = TemporaryServer()
    server.port = starting.port
    server.start(timeout=STARTUP_SECONDS)


def _spawn(port: int | None) -> subprocess.Popen:
    serve = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    options = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error", "--lifespan", "on"]
    settings = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guardian.__file__, str(os.getpid()), *serve, *options],
        env=os.environ | settings,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _require_writable(home: Path) -> None:
    probe = home / f".mcaflow-{os.getpid()}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(bytes(4096))
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"PREFECT_HOME: Prefect cannot write its database into {home}: {error.strerror}") from None
