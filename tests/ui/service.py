"""A Prefect server and a worker, as people start them: on a free port of loopback, in a folder of their own.

one_machine    `mcaflow server up --worker`
apart          `mcaflow server start`, `mcaflow server setup`, `prefect worker start`, as systemd and compose do
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).parents[2]
MCAFLOW = (sys.executable, "-m", "flows.cli")
PREFECT = (sys.executable, "-m", "prefect")
START_SECONDS = 180.0
STOP_SECONDS = 90.0
_RUN_ID = "PREFECT__FLOW_RUN_ID"


@dataclass(frozen=True)
class Service:
    """A server with a worker that looks for runs once a second."""

    folder: Path
    port: int
    env: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def mcaflow(self, *words: str) -> str:
        """A command for this server, which must succeed; returns what it printed."""
        return self._finish(*MCAFLOW, *words)

    def prefect(self, *words: str) -> str:
        return self._finish(*PREFECT, *words)

    def start(self, *argv: str, name: str) -> subprocess.Popen:
        """Start a command in a group of its own; its output is appended to `NAME.log`."""
        with open(self.log(name), "ab") as output:
            return subprocess.Popen(
                argv,
                env=self.env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def await_line(self, name: str, pattern: str, process: subprocess.Popen) -> None:
        """Wait until a line of a log matches."""
        deadline = time.monotonic() + START_SECONDS
        while not re.search(pattern, self.log(name).read_text(errors="replace")):
            self._require(process, name, deadline)
            time.sleep(0.1)

    def await_answer(self, name: str, process: subprocess.Popen) -> None:
        """Wait until the server is ready."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            self._require(process, name, deadline)
            try:
                if httpx.get(f"{self.url}/api/ready", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)

    def _require(self, process: subprocess.Popen, name: str, deadline: float) -> None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{name} did not start:\n{self.log(name).read_text(errors='replace')[-3000:]}")

    def _finish(self, *argv: str) -> str:
        done = subprocess.run(argv, env=self.env, cwd=self.folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv[2:])} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout


@contextmanager
def one_machine(folder: Path, *, gpus: int = 0, env: Mapping[str, str] | None = None) -> Iterator[Service]:
    """All by one command."""
    service = _prepare(folder, env)
    up = service.start(
        *MCAFLOW, "server", "up", "--worker", "--port", str(service.port), "--gpus", str(gpus), name="up"
    )
    try:
        service.await_line("up", r"Worker '.*' started", up)
        yield service
    finally:
        stop(up)


@contextmanager
def apart(folder: Path, *, gpus: int = 0, env: Mapping[str, str] | None = None) -> Iterator[Service]:
    """Server and worker as services of their own."""
    service = _prepare(folder, env)
    server = service.start(*MCAFLOW, "server", "start", "--port", str(service.port), name="server")
    worker = None
    try:
        service.await_answer("server", server)
        service.mcaflow("server", "setup", "--gpus", str(gpus))
        worker = service.start(*PREFECT, "worker", "start", "--pool", "mcaflow", "--type", "process", name="worker")
        service.await_line("worker", r"Worker '.*' started", worker)
        yield service
    finally:
        for process in (worker, server):
            if process is not None:
                stop(process)


def _prepare(folder: Path, env: Mapping[str, str] | None) -> Service:
    folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    own = {
        "PYTHONPATH": str(ROOT),
        "PREFECT_HOME": str(folder / "home"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_LOGGING_COLORS": "false",
        "COLUMNS": "200",
    }
    return Service(folder, port, kept | own | dict(env or {}))


def stop(process: subprocess.Popen) -> None:
    """SIGTERM, and SIGKILL when that does not help, which is an error."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def processes_of(run_id: str) -> list[psutil.Process]:
    """Every living process of a flow run, in whatever session or group."""
    return [process for process in psutil.process_iter() if _run_of(process) == run_id]


def _run_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(_RUN_ID) if process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None  # gone meanwhile, or another user's
