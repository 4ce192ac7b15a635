"""The temporary Prefect server of a run that no server is configured for.

Prefect would start one by itself, with three flaws (3.9): it outlives a run that is killed; Ctrl-C in a terminal
reaches it as well, so that the run can no longer tell it how it ended; and it has 20 seconds to start, which a busy
machine does not make.
"""

import os
import subprocess
import sys

from prefect.client.base import ServerType, determine_server_type
from prefect.server.api.server import SubprocessASGIServer

from tasks import guardian

STARTUP_SECONDS = 180


class TemporaryServer(SubprocessASGIServer):
    """Prefect's temporary server, below a guardian that ends it with this process."""

    def _run_uvicorn_command(self) -> subprocess.Popen:
        serve = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
        options = ["--host", "127.0.0.1", "--port", str(self.port), "--log-level", "error", "--lifespan", "on"]
        settings = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
        return subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, str(os.getpid()), *serve, *options],
            env=os.environ | settings,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def provide_server() -> None:
    """Start the temporary server if one is needed; it ends with this process.

    To be called in the main thread: the guardian's parent is a thread. Prefect finds the instance in its own registry.
    """
    if determine_server_type() == ServerType.EPHEMERAL:
        TemporaryServer().start(timeout=STARTUP_SECONDS)
