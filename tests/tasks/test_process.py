"""Children leave a log, say what they do, and never outlive the stage, however it ends."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tasks.errors import Cancelled, LeaseLost
from tasks.process import CommandFailed, kill_tagged, redact, run_command, terminate_all
from tests.tasks.toys import start

ROOT = Path(__file__).parents[2]
TOKEN = "hf_0123456789abcdef"

# A command like torchrun: starts ranks in sessions of their own, writes their pids, and waits for ever.
FAMILY = """
import os, subprocess, sys, time
rank = "import time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
ranks = [subprocess.Popen([sys.executable, "-c", rank], start_new_session=True) for _ in range(2)]
pids = [os.getpid(), *(r.pid for r in ranks)]
with open(sys.argv[1] + ".tmp", "w") as f:
    f.write(" ".join(map(str, pids)))
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
print("started", flush=True)
if len(sys.argv) == 2:
    time.sleep(1000)
"""


# Runs commands that succeed and fail, and says whether descriptors, threads and children are as after the first.
LEAVINGS = """
import sys
from contextlib import suppress
from pathlib import Path
import psutil
from tasks.process import CommandFailed, run_command
log, me = Path(sys.argv[1]), psutil.Process()
def run(code):
    listen = {"on_line": lambda line: None, "on_progress": lambda report: None}
    with suppress(CommandFailed):
        run_command([sys.executable, "-c", code], tag=f"test-{log}", log_path=log, **listen)
def state():
    return me.num_fds(), me.num_threads(), len(me.children())
run("pass")
before = state()
for code in ["print(1)", "raise SystemExit(1)"] * 3:
    run(code)
print(f"same {state() == before}, children {before[2]}")
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "child.log"


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    return tmp_path / "pids"


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def run(code: str, log: Path, *arguments: object, **options: object) -> None:
    run_command(python(code, *arguments), log_path=log, **{"tag": f"test-{log}", "grace": 5.0} | options)


def assert_gone(pids: Path, seconds: float = 60.0) -> None:
    """Every process of the family is dead, at the latest after some seconds."""
    family = [int(pid) for pid in pids.read_text().split()]
    assert len(family) == 3
    deadline = time.monotonic() + seconds
    while left := [pid for pid in family if is_running(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """False for a process that is gone, or dead and not yet collected."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


class Interrupt:
    """Raises in the parent as soon as the child has started."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, line: str) -> None:
        if line == "started":
            raise self.error


# -- the ordinary case -------------------------------------------------------------------------------------------


def test_output_goes_to_the_log_and_line_by_line_to_the_caller(log: Path) -> None:
    lines: list[str] = []
    code = "import sys\nprint('one')\nprint('two\\rthree', file=sys.stderr)\nprint('no end', end='')"
    run(code, log, on_line=lines.append)
    assert lines == ["one", "two", "three", "no end"]
    assert log.read_bytes() == b"one\ntwo\rthree\nno end"


def test_many_lines_all_arrive(log: Path) -> None:
    lines: list[str] = []
    run("for i in range(200_000): print(i)", log, on_line=lines.append)
    assert lines == [str(i) for i in range(200_000)]


def test_progress_arrives_and_a_broken_line_does_not(log: Path) -> None:
    reports: list[dict] = []
    code = (
        "import os\n"
        "with open(os.environ['MCAFLOW_PROGRESS'], 'a') as f:\n"
        '    f.write(\'{"done": 1, "total": 2}\\n{broken\\n[1]\\n{"done": 2, "total": 2, "loss": 0.5}\\n\')\n'
    )
    run(code, log, on_progress=reports.append)
    run(code, log, on_progress=reports.append)  # starts afresh, does not repeat the old lines
    assert reports == 2 * [{"done": 1, "total": 2}, {"done": 2, "total": 2, "loss": 0.5}]


def test_environment_and_folder_reach_the_child(log: Path, tmp_path: Path) -> None:
    code = "import os; print(os.environ['EXTRA'], os.environ['MCAFLOW_TAG'], os.getcwd())"
    run(code, log, env={"EXTRA": "yes"}, cwd=tmp_path)
    assert log.read_text() == f"yes test-{log} {tmp_path}\n"


def test_status_and_end_of_the_log_are_in_the_error(log: Path) -> None:
    with pytest.raises(CommandFailed, match=r"python\S*: exit status 3; log: .*child.log") as caught:
        run("print('the reason'); raise SystemExit(3)", log)
    assert caught.value.status == 3
    assert str(caught.value).endswith("the reason")


def test_signal_is_named_in_the_error(log: Path) -> None:
    with pytest.raises(CommandFailed, match=r"killed by SIGKILL .*out of memory"):
        run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", log)


def test_missing_program_is_an_error(log: Path) -> None:
    with pytest.raises(CommandFailed, match="exit status 127") as caught:
        run_command(["/no/such/program"], tag=f"test-{log}", log_path=log)
    assert "No such file" in str(caught.value)


def test_signals_are_not_blocked_in_the_child(log: Path) -> None:
    run("import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))", log)
    assert log.read_text() == "set()\n"


def test_no_descriptor_no_thread_and_no_child_is_left(tmp_path: Path) -> None:
    # In a process of its own: other tests of the session have threads, files and children open.
    left = subprocess.check_output(python(LEAVINGS, tmp_path / "log"), text=True, cwd=ROOT)
    assert left == "same True, children 0\n"


# -- secrets -----------------------------------------------------------------------------------------------------


def test_secrets_do_not_reach_the_child_unless_named(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "PREFECT_API_AUTH_STRING"):
        monkeypatch.setenv(name, TOKEN)
    code = f"import os; print(sorted(name for name, value in os.environ.items() if value == '{TOKEN}'))"
    run(code, log)
    run(code, log, secrets=("HF_TOKEN",))
    assert log.read_text() == "[]\n['HF_TOKEN']\n"


def test_secrets_are_blacked_out_in_errors(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(CommandFailed) as caught:
        run("import os; raise SystemExit('401 for ' + os.environ['HF_TOKEN'])", log, secrets=("HF_TOKEN",))
    assert "401 for <HF_TOKEN>" in str(caught.value)
    assert redact(f"a {TOKEN} b") == "a <HF_TOKEN> b"


# -- the end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("stage"), LeaseLost("lost")], ids=repr)
def test_error_in_the_stage_ends_all_of_the_command(log: Path, pids: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        run(FAMILY, log, pids, on_line=Interrupt(error))
    assert_gone(pids, seconds=0)


def test_lease_lost_ends_the_command(log: Path, pids: Path) -> None:
    def check() -> None:
        if pids.exists():
            raise LeaseLost("lost")

    with pytest.raises(LeaseLost):
        run(FAMILY, log, pids, check=check)
    assert_gone(pids, seconds=0)


def test_command_may_end_in_good_order(log: Path) -> None:
    code = (
        "import signal, time\n"
        "def end(*_): print('checkpoint saved', flush=True); raise SystemExit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('started', flush=True)\n"
        "time.sleep(1000)\n"
    )
    with pytest.raises(KeyboardInterrupt):
        run(code, log, on_line=Interrupt(KeyboardInterrupt()))
    assert log.read_text() == "started\ncheckpoint saved\n"


def test_stubborn_command_is_killed_after_its_grace(log: Path) -> None:
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('started', flush=True)\n"
        "time.sleep(1000)\n"
    )
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(KeyboardInterrupt):
        run(code, log, on_line=Interrupt(KeyboardInterrupt()), grace=0.2)
    assert {child.pid for child in psutil.Process().children()} <= before


def test_what_a_finished_command_leaves_behind_is_killed(log: Path, pids: Path) -> None:
    run(FAMILY, log, pids, "and return")
    assert_gone(pids, seconds=0)


def test_terminate_all_from_another_thread_ends_commands_in_threads(log: Path, pids: Path) -> None:
    started, ended = threading.Event(), []

    def stage() -> None:
        with pytest.raises(Cancelled):
            run(FAMILY, log, pids, on_line=lambda line: started.set())
        ended.append(True)

    thread = threading.Thread(target=stage)
    thread.start()
    assert started.wait(60)
    terminate_all()
    thread.join(60)
    assert ended == [True]
    assert_gone(pids, seconds=0)
    run("pass", log)  # a later run of the same process is not affected


@pytest.mark.parametrize("also_the_guardian", [False, True])
def test_killed_parent_takes_its_grandchildren_along(log: Path, pids: Path, also_the_guardian: bool) -> None:
    code = (
        "from tasks.process import run_command\n"
        "run_command([sys.executable, '-c', sys.argv[1], sys.argv[2]], tag=sys.argv[3], log_path=Path(sys.argv[4]),\n"
        "            on_line=lambda line: print(line, flush=True))\n"
    )
    parent = start(code, FAMILY, pids, f"test-{log}", log)
    assert parent.stdout.readline() == "started\n"
    (guardian,) = psutil.Process(parent.pid).children()
    parent.send_signal(signal.SIGKILL)
    if also_the_guardian:
        guardian.kill()
    parent.communicate()
    if also_the_guardian:
        # The next attempt at the same key sweeps up.
        run("pass", log)
    assert_gone(pids)


def test_only_processes_with_the_same_tag_are_killed(log: Path, pids: Path) -> None:
    def interfere(line: str) -> None:
        assert kill_tagged(f"test-{log}-other") == []
        assert all(psutil.pid_exists(int(pid)) for pid in pids.read_text().split())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(FAMILY, log, pids, on_line=interfere)
