"""The temporary Prefect server of a run on the command line.

Prefect would start one by itself, with three flaws (3.9): it outlives a run that is killed; Ctrl-C in a terminal
reaches it as well, so that the run can no longer tell it how it ended; and it has 20 seconds to start, which a busy
machine does not make.
"""

import os
import subprocess
import sys

from prefect.server.api.server import SubprocessASGIServer

from tasks import guardian


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
