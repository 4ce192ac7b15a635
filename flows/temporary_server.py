"""The temporary Prefect server of a run on the command line.

Prefect would start one by itself, with five flaws (3.9): it outlives a run that is killed; Ctrl-C in a terminal reaches
it as well, so that the run can no longer tell it how it ended; it has 20 seconds to start, which a busy machine does
not make; it starts only after this process has imported Prefect, which takes as long; and for that it has this process
import the server too. So the process is started here, without Prefect, below a guardian that ends it with this process,
and is named in PREFECT_API_URL: to Prefect it is a server like any other.
"""

import atexit
import http.client
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from mca_lib.errors import ConfigError
from tasks import guardian

STARTUP_SECONDS = 180
_STOP_SECONDS = 5.0
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Starting:
    """A server that was started and does not answer yet."""

    process: subprocess.Popen
    port: socket.socket
    """Bound and never listening: while it is open, nobody else is given the port."""

    @property
    def address(self) -> tuple[str, int]:
        return self.port.getsockname()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.send_signal(guardian.KILL_ALL)
            self.process.wait()
        self.port.close()


def start(home: Path) -> Starting:
    """Start a server with its database in `home`, for the settings of the environment, and name it there.

    It ends with this process. To be called in the main thread (the guardian's parent is a thread), and before Prefect
    is imported: later, Prefect must be told to read its settings again.

    Raises:
        ConfigError: `home` cannot be written.
    """
    _require_writable(home)
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the server may bind it too
    port.bind(("127.0.0.1", 0))
    starting = Starting(_spawn(port.getsockname()[1]), port)
    # First come, last served: Prefect, imported later, sends its last lines at the exit before the server stops.
    atexit.register(starting.stop)
    os.environ["PREFECT_API_URL"] = "http://{}:{}/api".format(*starting.address)
    return starting


def await_answer(starting: Starting) -> None:
    """Until it answers.

    Raises:
        RuntimeError: it does not start.
    """
    deadline = time.monotonic() + STARTUP_SECONDS
    while not _answers(starting):
        if (status := starting.process.poll()) is not None:
            raise RuntimeError(f"it ended with {status}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"it does not answer after {STARTUP_SECONDS} s")
        time.sleep(_LOOK_SECONDS)


def _answers(starting: Starting) -> bool:
    connection = http.client.HTTPConnection(*starting.address, timeout=10)
    try:
        connection.request("GET", "/api/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _spawn(port: int) -> subprocess.Popen:
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
