"""The launcher: nobody outside of this machine reaches it, no rank outlives it, and ranks keep the memory they free."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

RANK = """
import os, resource, signal, sys
from pathlib import Path
from mca_lib.rank_process import die_with_launcher
die_with_launcher()
assert os.environ["MASTER_ADDR"] == "127.0.0.1"
bytearray(64 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(64 << 20)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
Path(sys.argv[1], os.environ["RANK"]).write_text(f"{os.getpid()} {faults}")
signal.pause()
"""


@pytest.fixture
def launched(tmp_path):
    """The launcher, its two ranks, which wait, and the page faults of each when it took 64 MiB for the second time."""
    script, folder = tmp_path / "rank.py", tmp_path / "pids"
    script.write_text(RANK)
    folder.mkdir()
    options = ["--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    command = [sys.executable, "-m", "mca_lib.launch", *options, "--local-addr=127.0.0.1", script, folder]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GLIBC_", "MALLOC_"))}
    env |= {"PYTHONPATH": os.getcwd(), "CUDA_VISIBLE_DEVICES": ""}
    launcher = subprocess.Popen([*map(str, command)], env=env)
    while len(started(folder)) < 2:
        with contextlib.suppress(subprocess.TimeoutExpired):
            pytest.fail(f"the launcher ended with {launcher.wait(0.05)}")
    pids, faults = zip(*started(folder), strict=True)
    yield launcher, [psutil.Process(pid) for pid in pids], faults
    launcher.kill()
    launcher.wait()


def started(folder: Path) -> list[list[int]]:
    return [[int(number) for number in text.split()] for path in folder.iterdir() if (text := path.read_text())]


def test_it_listens_on_loopback_only_and_its_ranks_keep_their_memory_and_die_with_it(launched):
    launcher, ranks, faults = launched
    # Each block would be 16,384 pages, or 32 huge ones, that the kernel has to hand out anew.
    assert max(faults) < 16
    listening = [c.laddr.ip for c in psutil.Process(launcher.pid).net_connections() if c.status == psutil.CONN_LISTEN]
    assert listening
    assert set(listening) == {"127.0.0.1"}
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not [rank for rank in alive if rank.status() != psutil.STATUS_ZOMBIE]
