"""Several machines, here several supervisors on loopback: they meet, end together, and notice one that is gone.

The ranks are toys without torch. tests/tasks/test_train_stage.py trains on two machines.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mca_lib.launch_plan import LaunchPlan, split_endpoint
from mca_lib.rank_process import ERRORS_VARIABLE, LAUNCHER_FAILURE, first_failure
from tests.ports import free_port

ROOT = Path(__file__).parents[2]


class Machines:
    """A head and agents, each a process group of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "logs").mkdir()
        (folder / "failures").mkdir()
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.processes: list[subprocess.Popen] = []

    def head(self, *options: str, nnodes: int = 2, patience: float = 60.0) -> subprocess.Popen:
        plan = LaunchPlan(
            module="tests.toy_rank",
            arguments=str(self.folder / "plan.json"),
            logs=str(self.folder / "logs"),
            log_name="toy",
            nnodes=nnodes,
            env={ERRORS_VARIABLE: str(self.folder / "failures")},
        )
        (self.folder / "plan.json").write_text(plan.to_json())
        return self._start("head", self.endpoint, str(self.folder / "plan.json"), f"--patience={patience}", *options)

    def agent(self, *options: str) -> subprocess.Popen:
        return self._start("join", self.endpoint, *options)

    def _start(self, *arguments: str) -> subprocess.Popen:
        env = os.environ | {"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        env["MCAFLOW_PROGRESS"] = str(self.folder / "progress")
        command = [sys.executable, "-m", "mca_lib.nodes", *arguments]
        log = open(self.folder / f"process-{len(self.processes)}.log", "wb")  # noqa: SIM115
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=self.folder)
        log.close()
        self.processes.append(process)
        return process

    def ranks(self, count: int) -> list[psutil.Process]:
        """The ranks, once all have started."""
        while len(found := [path for path in self.folder.glob("pid-*") if path.read_text()]) < count:
            for process in self.processes:
                try:
                    pytest.fail(f"ended with {process.wait(0.05)}:\n{self.output()}")
                except subprocess.TimeoutExpired:
                    continue
        return [psutil.Process(int(path.read_text())) for path in found]

    def await_output(self, process: subprocess.Popen, text: str) -> None:
        log = self.folder / f"process-{self.processes.index(process)}.log"
        while text not in log.read_text():
            assert process.poll() is None, self.output()
            time.sleep(0.05)

    def order(self, text: str) -> None:
        (self.folder / "new").write_text(text)
        (self.folder / "new").rename(self.folder / "orders")

    def output(self) -> str:
        logs = [*self.folder.glob("*.log"), *self.folder.glob("logs/*")]
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(logs))

    def failure(self) -> dict:
        return first_failure(self.folder / "failures")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_all_machines_end_with_the_status_of_the_run_and_a_third_is_told_that_it_is_too_many(machines: Machines):
    agent = machines.agent()  # before the run
    head = machines.head()
    machines.ranks(2)
    listening = [c.laddr.ip for p in psutil.Process().children(recursive=True) for c in listeners(p)]
    assert set(listening) == {"127.0.0.1"}
    assert machines.agent().wait(60) == 1
    assert machines.head().wait(60) == 2
    assert "launcher.rdzv_endpoint: " + machines.endpoint in machines.failure()["message"]
    (machines.folder / "failures" / LAUNCHER_FAILURE).unlink()
    machines.order("fail 1")
    assert (head.wait(60), agent.wait(60)) == (2, 2), machines.output()
    assert machines.failure()["message"] == "row 3 is empty"
    assert [path.name for path in (machines.folder / "logs").iterdir()] == [f"toy.node1-{socket.gethostname()}.log"]


def test_a_sigterm_to_one_machine_lets_the_ranks_of_all_save(machines: Machines):
    head, agent = machines.head(), machines.agent()
    ranks = machines.ranks(2)
    agent.send_signal(signal.SIGTERM)
    assert (head.wait(60), agent.wait(60)) == (143, 143), machines.output()
    assert {path.name for path in machines.folder.glob("saved-*")} == {"saved-0", "saved-1"}
    assert_gone(ranks)
    assert f"machine 2 of 2 ({socket.gethostname()}) was told to stop" in machines.failure()["message"]


def listeners(process: psutil.Process) -> list:
    return [c for c in process.net_connections() if c.status == psutil.CONN_LISTEN]


def test_a_machine_that_is_killed_ends_the_run_and_is_named(machines: Machines):
    head = machines.head("--lost=8")
    agent = machines.agent()
    ranks = machines.ranks(2)
    (torchrun,) = psutil.Process(agent.pid).children()
    agent.kill()
    torchrun.kill()  # as the guardian of `mcaflow agent` would
    assert head.wait(90) == 1, machines.output()
    assert machines.failure()["message"] == f"machine 2 of 2 ({socket.gethostname()}) is lost: no sign of life for 8 s"
    assert_gone(ranks)


def test_agents_notice_that_the_head_is_gone(machines: Machines):
    head = machines.head()
    agent = machines.agent()
    ranks = machines.ranks(2)
    (torchrun,) = psutil.Process(head.pid).children()
    head.kill()
    torchrun.kill()
    assert agent.wait(60) == 1, machines.output()
    assert_gone(ranks)


def test_machines_that_do_not_come_are_counted(machines: Machines):
    agent = machines.agent()
    machines.await_output(agent, "waiting for a run")  # what it imports is none of the head's three seconds
    head = machines.head(nnodes=3, patience=3.0)
    assert (head.wait(60), agent.wait(60)) == (2, 2), machines.output()
    assert machines.failure()["message"].startswith("launcher.nnodes: 2 of 3 machines came within 3 s; run `mcaflow ")


@pytest.mark.parametrize("endpoint", ["node", "node:", ":29500", "node:0", "node:70000", "node:x"])
def test_an_endpoint_is_host_and_port(endpoint: str):
    with pytest.raises(ValueError, match="is not host:port"):
        split_endpoint(endpoint)
