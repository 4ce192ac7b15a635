"""The launcher `slurm` against a real cluster of one node: submitted, adopted, stopped, and never outliving its run."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mca_lib.errors import ResourceError
from tasks.contract import StageContext
from tasks.errors import Cancelled
from tasks.launchers import launch, slurm
from tasks.process import terminate_all
from tasks.report import LogReporter
from tasks.store import ArtifactStore
from tasks.training_config import LauncherConfig, SlurmConfig
from tests.slurm_cluster import cluster, missing

ROOT = Path(__file__).parents[2]
TWO_RANKS = LauncherConfig(kind="slurm", nproc_per_node=2, slurm=SlurmConfig(time_minutes=10))


@pytest.fixture(scope="module", autouse=True)
def slurm_conf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if lacking := missing():
        # .ci/run installs them, so that this cannot pass unseen there.
        assert "MCAFLOW_REQUIRE_SLURM" not in os.environ, f"the tests of Slurm need {lacking}"
        pytest.skip(f"NOT RUN: the tests of Slurm need {lacking}")
    with cluster(tmp_path_factory.mktemp("slurm")) as env, pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("HF_TOKEN", "hf_0123456789abcdef")
        yield


def run(folder: Path, launcher: LauncherConfig = TWO_RANKS) -> None:
    """What the stage of one key does, in a store of its own."""
    arguments = folder / "arguments.json"
    arguments.write_text("{}")
    (folder / "work").mkdir(exist_ok=True)
    tag = f"toy-{folder.name}@{os.getuid()}"
    context = StageContext(
        folder, folder / "work", LogReporter("toy"), ArtifactStore(folder / "store"), tag, lambda: None
    )
    launch(context, launcher, "tests.toy_rank", arguments, log_name="toy")


def start(folder: Path, abandoned: int = 120) -> subprocess.Popen:
    """`run` in a process of its own, which can be killed."""
    code = (
        "import sys; from pathlib import Path; from tasks.launchers import slurm\n"
        "slurm.ABANDONED_SECONDS = int(sys.argv[2])\n"
        "from tests.tasks.test_slurm import run; run(Path(sys.argv[1]))"
    )
    return subprocess.Popen([sys.executable, "-c", code, str(folder), str(abandoned)], cwd=ROOT)


def started(folder: Path, runner: subprocess.Popen | threading.Thread) -> list[psutil.Process]:
    """The two ranks, once they wait for orders."""
    while len(pids := [text for path in folder.glob("pid-*") if (text := path.read_text())]) < 2:
        alive = runner.is_alive() if isinstance(runner, threading.Thread) else runner.poll() is None
        if not alive:
            pytest.fail("\n".join(log.read_text() for log in folder.glob("work/**/*.log")))
        threading.Event().wait(0.05)
    return [psutil.Process(int(pid)) for pid in pids]


def in_thread(folder: Path, launcher: LauncherConfig = TWO_RANKS) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def body() -> None:
        try:
            run(folder, launcher)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    return thread, raised


def kill(runner: subprocess.Popen) -> None:
    runner.send_signal(signal.SIGKILL)
    runner.wait()


def saved(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("saved-*")}


def jobs() -> str:
    return subprocess.check_output(["squeue", "--noheader"], text=True)


def order(folder: Path, text: str) -> None:
    (folder / "new").write_text(text)
    (folder / "new").rename(folder / "orders")


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_the_job_of_a_run_that_was_killed_is_adopted_by_the_next_one(tmp_path: Path):
    killed = start(tmp_path)
    ranks = started(tmp_path, killed)
    kill(killed)
    thread, raised = in_thread(tmp_path)
    log, progress = (tmp_path / "work" / "logs" / name for name in ("toy.log", "toy.progress"))
    while "of an earlier run goes on" not in progress.read_text():
        assert thread.is_alive(), raised
        thread.join(0.05)
    assert all(rank.is_running() for rank in ranks)
    order(tmp_path, "done")
    thread.join(60)
    assert raised == []
    assert jobs() == ""
    assert "has a token: False" in log.read_text(), "the job's log is the run's, and secrets are not passed on"


def test_stopped_it_stops_the_job_of_an_earlier_run_and_its_own_and_the_ranks_of_both_save(tmp_path: Path):
    killed = start(tmp_path)
    ranks = started(tmp_path, killed)
    kill(killed)
    for path in tmp_path.glob("pid-*"):
        path.unlink()
    thread, raised = in_thread(tmp_path, TWO_RANKS.model_copy(update={"omp_num_threads": 2}))
    others = started(tmp_path, thread)
    assert_gone(ranks)
    assert saved(tmp_path) == {"saved-0", "saved-1"}
    for path in tmp_path.glob("saved-*"):
        path.unlink()
    terminate_all()
    thread.join(100)
    assert [type(error) for error in raised] == [Cancelled]
    assert saved(tmp_path) == {"saved-0", "saved-1"}
    assert_gone(others)
    assert jobs() == ""


def test_a_job_that_nobody_waits_for_ends_itself(tmp_path: Path):
    killed = start(tmp_path, abandoned=3)
    ranks = started(tmp_path, killed)
    kill(killed)
    assert_gone(ranks)
    assert saved(tmp_path) == {"saved-0", "saved-1"}


def test_what_a_rank_found_and_what_slurm_refuses_are_one_line(tmp_path: Path):
    order(tmp_path, "fail 1")
    with pytest.raises(Exception, match="row 3 is empty") as caught:
        run(tmp_path)
    assert type(caught.value).__name__ == "DataError"
    refused = TWO_RANKS.model_copy(update={"slurm": SlurmConfig(partition="nonsense")})
    with pytest.raises(ResourceError, match=r"launcher.slurm: sbatch refused the job: .*invalid partition") as caught:
        run(tmp_path, refused)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"slurm": SlurmConfig(partition="nonsense")}, "invalid partition"),
        ({"nnodes": 4}, "node configuration is not available"),
        ({"slurm": SlurmConfig(gpus_per_node=8)}, r"generic resource \(gres\)"),
    ],
)
def test_what_slurm_would_refuse_is_said_before_a_run(fields: dict, reason: str):
    slurm.check_job(TWO_RANKS)
    with pytest.raises(ResourceError, match=f"launcher.slurm: sbatch refuses the job: .*{reason}") as caught:
        slurm.check_job(TWO_RANKS.model_copy(update=fields))
    assert "\n" not in str(caught.value)


def test_a_job_that_needs_a_node_that_is_drained_may_wait_for_it():
    node = ["scontrol", "update", f"nodename={socket.gethostname().partition('.')[0]}"]
    subprocess.run([*node, "state=drain", "reason=test"], check=True)
    try:
        slurm.check_job(TWO_RANKS)
    finally:
        subprocess.run([*node, "state=resume"], check=True)


def test_states_are_known_without_accounting_and_after_the_controller_forgot_the_job(tmp_path: Path):
    assert slurm.Slurm(tmp_path, "99999").state().name == "FORGOTTEN"
    (tmp_path / slurm.STATUS).write_text("99999 143")
    assert slurm.Slurm(tmp_path, "99999").state() == slurm.JobState("FAILED", "", 143)
