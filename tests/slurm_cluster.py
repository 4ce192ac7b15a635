"""A Slurm cluster of one node on loopback, for tests: munged, slurmctld and slurmd of Debian's `slurm-wlm` and `munge`.

All of its files are in one folder, it runs without accounting, and it ends with the block. Needs root.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from tests.ports import free_port

PORT_TRIES = 3
DAEMONS = ("munged", "slurmctld", "slurmd")
_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmUser=root
SlurmdUser=root
ReturnToService=2
MpiDefault=none
KillWait=5
InactiveLimit=0
OverTimeLimit=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1000
PartitionName=debug Nodes={host} Default=YES MaxTime=60 State=UP
"""


def missing() -> str | None:
    """What this machine lacks for a cluster; None when nothing."""
    absent = [name for name in (*DAEMONS, "sbatch") if _find(name) is None]
    if absent:
        return f"{', '.join(absent)} of Debian's slurm-wlm and munge"
    return "root" if os.geteuid() else None


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run the daemons; yields the environment in which Slurm's commands find them."""
    conf, key = folder / "slurm.conf", folder / "munge.key"
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    with ExitStack() as stack:
        for tries_left in reversed(range(PORT_TRIES)):
            try:
                stack.enter_context(_daemons(folder, conf))
                break
            except PortTaken:
                if not tries_left:
                    raise
        stack.callback(_kill_jobs, str(conf))
        yield {"SLURM_CONF": str(conf)}


class PortTaken(Exception):
    """A daemon could not listen: something has bound its port since it was found free."""


@contextmanager
def _daemons(folder: Path, conf: Path) -> Iterator[None]:
    """Write the configuration and run what it says, on ports that are free."""
    host = socket.gethostname().partition(".")[0]
    conf.write_text(_CONF.format(host=host, folder=folder, ports=(free_port(), free_port()), cpus=os.cpu_count()))
    env = os.environ | {"SLURM_CONF": str(conf)}
    names = {"key-file": folder / "munge.key"} | {
        name: folder / f"munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")
    }
    munged = ["munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in names.items())]
    commands = [munged, ["slurmctld", "-D", "-i"], ["slurmd", "-D", "-N", host]]
    started = []
    try:
        for command in commands:
            with open(folder / f"{command[0]}.out", "wb") as output:
                argv = [_find(command[0]), *command[1:]]
                started.append(subprocess.Popen(argv, env=env, stdout=output, stderr=output, start_new_session=True))
            if command[0] == "munged":
                _await((folder / "munge.socket").exists, started, folder)
        idle = ["sinfo", "-h"]
        _await(lambda: b"idle" in subprocess.run(idle, env=env, capture_output=True).stdout, started, folder)
        yield
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _kill_jobs(conf: str) -> None:
    """What a test that failed left running: all that has this cluster in its environment."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("SLURM_CONF") == conf and process.pid != os.getpid():
                process.kill()
        except psutil.Error:
            continue


def _await(condition: Callable[[], bool], daemons: list[subprocess.Popen], folder: Path) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        ended = any(daemon.poll() is not None for daemon in daemons)
        if ended or time.monotonic() > deadline:
            logs = "\n".join(
                f"--- {log.name}\n{log.read_text()[-2000:]}" for log in [*folder.glob("*.out"), *folder.glob("*.log")]
            )
            if ended and "Address already in use" in logs:
                raise PortTaken(logs)
            raise TimeoutError(logs)
        time.sleep(0.1)


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
