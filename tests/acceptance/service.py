"""A real service for the acceptance scripts: `mcaflow server up` with a worker, and runs of its deployments.

Every process of the service inherits MARK, those of a run also the run's id, so that none can hide.
"""

import json
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import TaskRunSort
from prefect.states import Scheduled

from flows.hooks import RUN_ID
from tests.acceptance.harness import MARK, ROOT, Complaint, Workplace, check

_MCAFLOW = (sys.executable, "-m", "flows.cli")
START_SECONDS = 180.0


class Service:
    """Server and worker of one folder."""

    def __init__(self, place: Workplace, name: str, **env: str) -> None:
        """
        Args:
            env: Settings of Prefect beside those of `mcaflow server up`.
        """
        self.place, self.port, self.mark = place, _free_port(), uuid.uuid4().hex
        self.home = place.folder / name / "prefect"
        self.home.mkdir(parents=True, exist_ok=True)
        self.log = place.folder / name / "service.log"
        self.url = f"http://127.0.0.1:{self.port}/api"
        outside = {key: value for key, value in place.environment().items() if not key.startswith("PREFECT")}
        self.env = outside | {"PREFECT_HOME": str(self.home), "PREFECT_API_URL": self.url, MARK: self.mark} | env
        self.up: subprocess.Popen | None = None
        self._others: list[subprocess.Popen] = []

    @property
    def client(self) -> SyncPrefectClient:
        return SyncPrefectClient(self.url)

    def start(self, *flags: str) -> None:
        """`mcaflow server up`, until it answers and has set up what it needs."""
        self.log.unlink(missing_ok=True)
        self.up = self._spawn([*_MCAFLOW, "server", "up", "--port", str(self.port), *flags])
        await_true(lambda: "export PREFECT_API_URL" in self.output(), START_SECONDS, "the service does not start")

    def start_worker(self) -> psutil.Process:
        """A worker as systemd has it, without anything that starts it again."""
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "mcaflow", "--type", "process"]
        process = self._spawn(command)
        self._others.append(process)
        return psutil.Process(process.pid)

    def call(self, *arguments: str, expect: int = 0) -> str:
        """A command of mcaflow beside the service."""
        done = subprocess.run([*_MCAFLOW, *arguments], env=self.env, capture_output=True, text=True, cwd=ROOT)
        text = done.stdout + done.stderr
        check(done.returncode == expect, f"mcaflow {arguments[0]} ended with {done.returncode}:\n{text}")
        return text

    def deploy(self, name: str, *flags: str, **fields: Any) -> None:
        """The demonstration as a deployment, with fields of the recipe beside those of the workplace."""
        every = {"name": name, "model.name_or_path": str(self.place.model), "dataset.files": [str(self.place.data)]}
        every |= self.place.fields | {key.replace("__", "."): value for key, value in fields.items()}
        settings = [part for key, value in every.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        self.call("deploy", str(ROOT / "deployments/recipes/demo.yaml"), *settings, *flags)

    def run(self, deployment: str, until: str | None = None, **sections: dict[str, Any]) -> "ServiceRun":
        """Start a deployment as the UI does; `sections` change fields of its recipe."""
        with self.client as client:
            found = client.read_deployment_by_name(deployment)
            config = found.parameters["config"]
            for section, fields in sections.items():
                config[section] = config.get(section, {}) | fields
            parameters = {"config": config} | ({"until": until} if until else {})
            made = client.create_flow_run_from_deployment(found.id, parameters=parameters)
        return ServiceRun(self, made.id, Path(config["store"]["path"]))

    def processes(self, part: str = "") -> list[psutil.Process]:
        """Living processes of the service whose command line has `part`, the oldest first; guardians are left out."""
        found = []
        for process in psutil.process_iter():
            try:
                line = " ".join(process.cmdline())
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get(MARK) == self.mark and part in line and "guardian.py" not in line:
                    found.append(process)
            except psutil.Error:
                continue
        return sorted(found, key=lambda process: process.create_time())

    def server(self) -> psutil.Process:
        """Whoever listens at the port."""
        for process in self.processes():
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == self.port:
                    return process
        raise Complaint("no process listens at the server's port")

    def worker(self) -> psutil.Process:
        return self.processes("worker start")[0]

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def stop(self) -> None:
        """End everything; a process that stays is a complaint."""
        # Workers first: one whose server is gone asks for it for half an hour.
        for process in [*self._others, self.up]:
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:  # a worker waits for its runs
                    process.kill()
                    process.wait()
        deadline = time.monotonic() + 60
        while left := {process: _command(process) for process in self.processes()}:
            if time.monotonic() > deadline:
                for process in left:
                    process.kill()
                raise Complaint(f"processes of the service are left: {'; '.join(left.values())}")
            time.sleep(0.25)

    @contextmanager
    def running(self, *flags: str) -> Iterator["Service"]:
        try:
            self.start(*flags)
            yield self
        except Complaint:
            with suppress(Complaint):
                self.stop()
            raise
        except BaseException:
            self.stop()
            raise
        self.stop()

    def _spawn(self, command: list[str]) -> subprocess.Popen:
        # A shell's background jobs ignore SIGINT, and so would a worker: it makes of SIGTERM a SIGINT to itself.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                command, env=self.env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )


@dataclass(frozen=True)
class ServiceRun:
    """A run of a deployment."""

    service: Service
    id: uuid.UUID
    store: Path

    def read(self) -> FlowRun:
        with self.service.client as client:
            return client.read_flow_run(self.id)

    def state(self) -> str:
        state = self.read().state
        return state.name if state else "none"

    def family(self) -> list[psutil.Process]:
        """Every living process of the run, the oldest, which runs the flow, first."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(RUN_ID) == str(self.id):
                    found.append(process)
            except psutil.Error:
                continue
        return sorted(found, key=lambda process: process.create_time())

    def await_step(self, step: int, seconds: float = 300) -> None:
        """Until the training has done so many steps."""

        def there() -> bool:
            state = self.read().state
            check(state is None or not state.is_final(), f"ended as {state} before step {step}")
            return bool(steps := self.steps()) and steps[-1] >= step

        await_true(there, seconds, f"the training does not reach step {step}; {self.state()}")

    def steps(self) -> list[int]:
        """Steps that the attempt at hand has reported."""
        found = []
        for path in self.store.glob(".work/train-*/logs/train.progress"):
            found += [json.loads(line).get("step") for line in path.read_text().splitlines() if line.endswith("}")]
        return [step for step in found if step is not None]

    def await_end(self, seconds: float) -> tuple[str, float]:
        """(name of the final state, seconds until it)."""
        began = time.monotonic()

        def ended() -> bool:
            state = self.read().state
            return state is not None and state.is_final()

        await_true(ended, seconds, f"still {self.state()}")
        return self.state(), time.monotonic() - began

    def await_nothing_left(self, seconds: float = 60) -> float:
        """Seconds until no process of the run is left."""
        began = time.monotonic()
        while left := self.family():
            check(time.monotonic() - began < seconds, f"processes live on: {'; '.join(map(_command, left))}")
            time.sleep(0.05)
        return time.monotonic() - began

    def retry(self) -> None:
        """As the button Retry of the UI."""
        with self.service.client as client:
            client.set_flow_run_state(self.id, Scheduled(name="AwaitingRetry", message="Retry from the UI"), force=True)

    def stages(self) -> dict[str, str]:
        """Stage -> state, of the newest attempt."""
        with self.service.client as client:
            count = client.read_flow_run(self.id).run_count
            found = client.read_task_runs(
                flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[self.id])), sort=TaskRunSort.END_TIME_DESC
            )
        order = sorted(found, key=lambda task: task.expected_start_time)
        # A task's name is its stage's, with key and size once there is an artifact.
        return {task.name.split()[0]: task.state_name or "" for task in order if task.flow_run_run_count == count}

    def resumed_from(self) -> int:
        """Step of the checkpoint that the last attempt at training went on from; 0 for none."""
        logs = [*self.store.glob(".runs/train-*/logs/train.log"), *self.store.glob(".work/train-*/logs/train.log")]
        found = [
            int(step) for log in logs for step in re.findall(r"resuming from \S*checkpoint-(\d+)", log.read_text())
        ]
        return found[-1] if found else 0

    def leftovers(self) -> list[str]:
        """What is left of leases, staging folders and locks of names, by its path in the store."""
        return [f"{name}/{path.name}" for name in (".leases", ".staging") for path in self.store.glob(f"{name}/*")]


def await_true(condition: Callable[[], bool], seconds: float, complaint: str, poll: float = 0.25) -> None:
    """Ask again and again; complain when it takes too long. A server that is away is asked again too."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except httpx.HTTPError:
            pass
        check(time.monotonic() < deadline, f"{complaint} (after {seconds:.0f} s)")
        time.sleep(poll)


def _command(process: psutil.Process) -> str:
    """A process, its parent and what it runs, as far as they can still be seen."""
    try:
        return f"{process.pid} below {process.ppid()}, {process.status()}: {' '.join(process.cmdline())[:150]}"
    except psutil.Error:
        return f"{process.pid}, gone meanwhile"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
