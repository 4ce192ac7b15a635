"""What a Slurm job runs on each of its nodes: ``python -m tasks.launchers.slurm_node FOLDER``; see `slurm_run` beside.

torchrun under a guardian. On one node it listens on loopback; on several, the first one is the head of `mca_lib.nodes`
and the others join it.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from mca_lib.launch_plan import LaunchPlan
from mca_lib.rank_process import ERRORS_VARIABLE
from tasks.launchers.slurm import ALIVE, GRACE_SECONDS, REQUEST, STATUS, STOPPED
from tasks.process import CommandFailed, run_command


class Abandoned(Exception):
    """The run that asked for this job is gone."""


def main(folder: Path) -> int:
    """See the module; returns the exit status."""
    signal.signal(signal.SIGTERM, _terminated)
    job_id, place = os.environ["SLURM_JOB_ID"], int(os.environ["SLURM_NODEID"])
    request = json.loads((folder / REQUEST).read_text())
    plan = LaunchPlan(**request["plan"])
    if place == 0:
        _forget_former_start(folder, Path(plan.env[ERRORS_VARIABLE]))
    log = plan.log_of("job" if place == 0 else f"job-{socket.gethostname()}")
    variables = [f"{name}={value}" for name, value in plan.env.items()]
    try:
        run_command(
            ["env", *variables, *_command(plan, job_id, place, folder)],
            tag=f"slurm-{job_id}-{place}",
            log_path=log,
            check=_owner_is_alive(folder, place, request["abandoned"]),
            grace=GRACE_SECONDS,
        )
        status = 0
    except CommandFailed as error:
        status = error.status
    except (Abandoned, SystemExit) as error:
        print(error, file=sys.stderr)
        status = STOPPED
    if place == 0:
        (folder / STATUS).write_text(f"{job_id} {status}")
    return status


def _command(plan: LaunchPlan, job_id: str, place: int, folder: Path) -> list[str]:
    if plan.nnodes == 1:
        return plan.on_this_machine
    from submitit.slurm.slurm import SlurmJobEnvironment

    first = SlurmJobEnvironment().hostnames[0]
    # Two jobs may share a node: a port of its own for each, below those that the kernel hands out.
    endpoint = f"{first}:{20000 + int(job_id) % 10000}"
    nodes = [sys.executable, "-m", "mca_lib.nodes"]
    if place:
        return [*nodes, "join", endpoint, f"--run={job_id}"]
    own = folder / "plan.json"
    own.write_text(plan.to_json())
    return [*nodes, "head", endpoint, str(own), f"--run={job_id}"]


def _owner_is_alive(folder: Path, place: int, limit: float) -> Callable[[], None]:
    """A check that raises Abandoned. Compares time stamps of one file system, so the clocks of hosts do not matter."""
    mine = folder / f"{ALIVE}-{place}"

    def check() -> None:
        mine.touch()
        with open(folder / ALIVE) as file:  # opening it makes NFS fetch the time stamp afresh
            age = mine.stat().st_mtime - os.fstat(file.fileno()).st_mtime
        if age > limit:
            raise Abandoned(f"the run that asked for this job has not been heard of for {age:.0f} s; stopping")

    return check


def _forget_former_start(folder: Path, failures: Path) -> None:
    """A job that was preempted starts anew: how it ended before is not how it ends."""
    (folder / STATUS).unlink(missing_ok=True)
    for path in failures.glob("*.json"):
        path.unlink(missing_ok=True)


def _terminated(number: int, frame: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm may say it again
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
