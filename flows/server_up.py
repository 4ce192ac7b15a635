"""``mcaflow server up``: a Prefect server for one machine, with what belongs to it, in the foreground.

    server        SQLite below PREFECT_HOME, on 127.0.0.1, with the settings of `flows.server_settings`
    set-up        work pool, GPU limit, automations; all found again by name, so that a restart changes nothing
    --worker      a worker beside it

Both children live below a guardian and are started again when they end by themselves. Ctrl-C waits for what runs, a
second one and SIGTERM cancel it (a training writes a checkpoint first).
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import NoReturn

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectHTTPStatusError

from flows import automations, drain, server_lock
from flows.heartbeats import give_time_to_report
from flows.server_setup import set_up
from flows.temporary_server import STARTUP_SECONDS
from mca_lib.errors import ConfigError
from tasks import guardian

_LOOK_SECONDS = 0.5
_AGAIN_SECONDS = 2.0
_STOP_SECONDS = 30.0


@dataclass(frozen=True)
class Setup:
    """What `mcaflow server up` was asked for."""

    url: str
    pool: str
    worker: bool
    gpus: int
    notify: str | None


@dataclass
class Stop:
    """How often, and by what, this process was told to end."""

    interrupts: int = 0
    terminated: bool = False

    @property
    def asked(self) -> bool:
        return self.terminated or self.interrupts > 0

    @property
    def impatient(self) -> bool:
        return self.terminated or self.interrupts > 1

    def listen(self) -> None:
        """Count signals from now on, in place of dying of them."""
        signal.signal(signal.SIGINT, self._interrupt)
        signal.signal(signal.SIGTERM, self._terminate)

    def _interrupt(self, number: int, frame: object) -> None:
        self.interrupts += 1

    def _terminate(self, number: int, frame: object) -> None:
        self.terminated = True


@dataclass
class Child:
    """A command below a guardian of its own, out of reach of the terminal's Ctrl-C."""

    name: str
    command: list[str]
    process: subprocess.Popen | None = field(default=None)

    def start(self) -> None:
        argv = [sys.executable, "-I", "-S", guardian.__file__, str(os.getpid()), *self.command]
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)

    def has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to all of it when that does not help."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.send_signal(guardian.KILL_ALL)
            self.process.wait()


def serve(setup: Setup) -> None:
    """Start everything, keep it up, and stop it in good order when told to."""
    server_lock.claim()
    stop = Stop()
    stop.listen()
    prefect = [sys.executable, "-m", "prefect"]
    server = Child("server", [*prefect, "server", "start"])
    worker = Child("worker", [*prefect, "worker", "start", "--pool", setup.pool, "--type", "process"])
    try:
        _start_server(server, setup.url, stop)
        if stop.asked:
            return
        set_up(setup.pool, setup.gpus, setup.notify)
        if setup.worker:
            worker.start()
        print(f"mcaflow: server at {setup.url.removesuffix('/api')}; for other terminals:")
        print(f"    export PREFECT_API_URL={setup.url}", flush=True)
        _keep_up(server, worker, setup, stop)
        _end_runs(setup, stop)
    finally:
        worker.stop()
        server.stop()


def start_alone() -> NoReturn:
    """``mcaflow server start``: become the server, for systemd and containers, which start it again themselves."""
    server_lock.claim()
    asyncio.run(give_time_to_report(automations.ZOMBIE, automations.zombie_within()))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "prefect", "server", "start"])


def _start_server(server: Child, url: str, stop: Stop) -> None:
    asyncio.run(give_time_to_report(automations.ZOMBIE, automations.zombie_within()))
    server.start()
    deadline = time.monotonic() + STARTUP_SECONDS
    while not stop.asked and not _answers():
        if server.has_ended() or time.monotonic() > deadline:
            raise ConfigError("the Prefect server did not start; its own output above says why")
        time.sleep(_LOOK_SECONDS)


def _answers() -> bool:
    """Whether the API works; its health alone says little."""
    try:
        with get_client(sync_client=True) as client:
            client.read_flows(limit=1)
            return True
    except PrefectHTTPStatusError as error:
        if error.response.status_code in (401, 403):
            raise ConfigError(
                "PREFECT_API_AUTH_STRING: other credentials than PREFECT_SERVER_API_AUTH_STRING"
            ) from None
        return False
    except httpx.HTTPError:
        return False


def _keep_up(server: Child, worker: Child, setup: Setup, stop: Stop) -> None:
    """Until told to stop, start again what has ended."""
    while not stop.asked:
        if server.has_ended():
            print("mcaflow: the server has ended by itself; starting it again", file=sys.stderr, flush=True)
            time.sleep(_AGAIN_SECONDS)
            _start_server(server, setup.url, stop)
        if worker.has_ended():
            print("mcaflow: the worker has ended by itself; starting it again", file=sys.stderr, flush=True)
            time.sleep(_AGAIN_SECONDS)
            worker.start()
        time.sleep(_LOOK_SECONDS)


def _end_runs(setup: Setup, stop: Stop) -> None:
    """Let the worker's runs come to their end, or cancel them."""
    if not setup.worker:
        return
    with get_client(sync_client=True) as client:
        drain.pause(client, setup.pool, paused=True)
        if drain.under_way(client, setup.pool) and not stop.impatient:
            print("mcaflow: waits for what runs; Ctrl-C again cancels it", flush=True)
        drain.wait(client, setup.pool, lambda: stop.impatient)
