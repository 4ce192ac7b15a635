"""One server for one PREFECT_HOME with SQLite: two on one database each schedule its runs and clean up after the other.

The lock ends with the process that holds it, however that dies. A server on PostgreSQL needs none.
"""

import errno
import fcntl
import os
import socket
from pathlib import Path

from prefect.settings import get_current_settings

from mca_lib.errors import ConfigError

NAME = "mcaflow-server.lock"


def claim() -> None:
    """Make sure that a server can start as Prefect's settings say, and be the only one here until this process ends.

    The lock outlives `exec`; processes that this one starts do not have it.

    Raises:
        ConfigError: the port cannot be had, or another server has the database.
    """
    settings = get_current_settings()
    api, database = settings.server.api, settings.server.database
    if database.connection_url.get_secret_value().startswith("sqlite"):
        _hold(settings.home, api.port)
    _require_free(api.host, api.port)


def _hold(home: Path, port: int) -> None:
    try:
        home.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(home / NAME, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.set_inheritable(descriptor, True)  # `mcaflow server start` becomes another program
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()}, port {port}".encode())
    except BlockingIOError:
        holder = os.read(descriptor, 100).decode() or "it is starting"
        raise ConfigError(
            f"PREFECT_HOME: a server with the SQLite database in {home} runs already ({holder}); use that one, stop "
            "it, or give this one another PREFECT_HOME"
        ) from None
    except OSError as error:
        raise ConfigError(f"PREFECT_HOME: cannot lock {home / NAME}: {error.strerror}") from None


def _require_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(f"--port {port}: cannot listen at {host}: {error.strerror}") from None
        raise ConfigError(
            f"--port {port}: a server or another program listens there already; stop it, or use another --port"
        ) from None
