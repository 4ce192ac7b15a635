"""The launcher: nobody outside of this machine reaches it, and no rank outlives it."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

RANK = """
import os, signal, sys
from pathlib import Path
from mca_lib.rank_process import die_with_launcher
die_with_launcher()
assert os.environ["MASTER_ADDR"] == "127.0.0.1"
Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
signal.pause()
"""


@pytest.fixture
def launched(tmp_path):
    """The launcher and its two ranks, which wait."""
    script, folder = tmp_path / "rank.py", tmp_path / "pids"
    script.write_text(RANK)
    folder.mkdir()
    options = ["--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    command = [sys.executable, "-m", "mca_lib.launch", *options, "--local-addr=127.0.0.1", script, folder]
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    launcher = subprocess.Popen([*map(str, command)], env=env)
    while len(started(folder)) < 2:
        with contextlib.suppress(subprocess.TimeoutExpired):
            pytest.fail(f"the launcher ended with {launcher.wait(0.05)}")
    yield launcher, [psutil.Process(pid) for pid in started(folder)]
    launcher.kill()
    launcher.wait()


def started(folder: Path) -> list[int]:
    return [int(text) for path in folder.iterdir() if (text := path.read_text())]


def test_it_listens_on_loopback_only_and_its_ranks_die_with_it(launched):
    launcher, ranks = launched
    listening = [c.laddr.ip for c in psutil.Process(launcher.pid).net_connections() if c.status == psutil.CONN_LISTEN]
    assert listening
    assert set(listening) == {"127.0.0.1"}
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not [rank for rank in alive if rank.status() != psutil.STATUS_ZOMBIE]
