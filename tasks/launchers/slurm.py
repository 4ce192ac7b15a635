"""Slurm's side of the launcher: what a run asks for, and one job as its client commands show it.

States come from `scontrol`, which needs no accounting; when it has forgotten the job, from `sacct` or from the status
that the job left.
"""

import shutil
import signal
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mca_lib.errors import ResourceError
from mca_lib.launch_plan import LaunchPlan
from tasks.training_config import LauncherConfig

REQUEST, ALIVE, OWNER, STATUS = "request.json", "alive", "owner", "status"
GRACE_SECONDS = 90.0
"""For the ranks to write a checkpoint after SIGTERM."""
NOTICE_SECONDS = 120
"""Before the time limit, for the same."""
ABANDONED_SECONDS = 120
"""A job ends itself when it has not heard of its run for so long: longer than the minute for which NFS may show an old
time stamp."""
POLL_SECONDS = (1.0, 15.0)
STOPPED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class JobState:
    """`name` as of Slurm (PENDING, RUNNING, COMPLETED, …); `status` is the batch script's, where it is known."""

    name: str
    reason: str = ""
    status: int | None = None

    @property
    def active(self) -> bool:
        return self.name in ("PENDING", "RUNNING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING", "UNKNOWN")

    @property
    def ending(self) -> bool:
        return self.name in ("COMPLETING", "STOPPED", "SIGNALING", "STAGE_OUT")


class Slurm:
    """One job of Slurm, by the commands of its client. A controller that does not answer is waited for."""

    def __init__(self, folder: Path, job_id: str) -> None:
        self.folder, self.job_id = folder, job_id

    def state(self) -> JobState:
        found = run_client("scontrol", "show", "job", "--oneliner", self.job_id)
        if found.returncode == 0:
            fields = dict(part.split("=", 1) for part in found.stdout.split() if "=" in part)
            status = int(fields["ExitCode"].partition(":")[0])
            return JobState(fields["JobState"], fields["Reason"], status)
        if "Invalid job id" not in found.stderr:
            return JobState("UNKNOWN", " ".join(found.stderr.split()))
        return self._from_accounting() or self._from_status_file() or JobState("FORGOTTEN")

    def signal(self, name: str) -> None:
        run_client("scancel", f"--signal={name}", self.job_id)

    def cancel(self) -> None:
        run_client("scancel", self.job_id)

    def end(self, grace: float) -> None:
        """SIGTERM, `grace` seconds, `scancel`; returns when the job is no more."""
        deadline, told = time.monotonic() + grace, False
        while True:
            state = self.state()
            if not state.active and not state.ending:
                return
            if state.name == "PENDING" or time.monotonic() > deadline:
                self.cancel()
            elif not told:
                self.signal("TERM")
                told = True
            time.sleep(0.5)

    def _from_accounting(self) -> JobState | None:
        if shutil.which("sacct") is None:
            return None
        found = run_client("sacct", "-j", self.job_id, "-X", "-n", "-P", "-o", "State,ExitCode")
        state, _, status = found.stdout.strip().partition("|")
        return (
            JobState(state.split()[0], "", int(status.partition(":")[0])) if found.returncode == 0 and state else None
        )

    def _from_status_file(self) -> JobState | None:
        """What the first node's task wrote when it ended."""
        try:
            job_id, status = (self.folder / STATUS).read_text().split()
        except (OSError, ValueError):
            return None
        if job_id != self.job_id:
            return None
        return JobState("FAILED" if int(status) else "COMPLETED", "", int(status))


def request(tag: str, launcher: LauncherConfig, plan: LaunchPlan) -> dict[str, Any]:
    """What FOLDER/request.json holds; two jobs of the same request do the same.

    `tag` is of the artifact, and becomes the name of the job.
    """
    artifact, _, store = tag.partition("@")
    stage, _, key = artifact.rpartition("-")
    return {
        "options": _options(f"mcaflow-{stage}-{key[:12]}-{store}", launcher),
        "notice": _notice(launcher),
        "abandoned": ABANDONED_SECONDS,
        "plan": asdict(plan),
        "arguments": Path(plan.arguments).read_text(),
    }


def _notice(launcher: LauncherConfig) -> int:
    return min(NOTICE_SECONDS, 60 * launcher.slurm.time_minutes // 2)


def _options(job_name: str, launcher: LauncherConfig) -> dict[str, Any]:
    """Parameters of submitit."""
    config = launcher.slurm
    options = {
        "job_name": job_name,
        "nodes": launcher.nnodes,
        "ntasks_per_node": 1,
        "cpus_per_task": config.cpus_per_task,
        "gpus_per_node": config.gpus_per_node or None,
        "time": config.time_minutes,
        "mem": config.mem_gb,
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "constraint": config.constraint,
        "setup": config.setup,
        "additional_parameters": {"signal": f"TERM@{_notice(launcher)}"} | config.additional,
    }
    given = {name: value for name, value in options.items() if value is not None}
    # submitit's own choice of a wckey is refused where these are enforced.
    return given | {"stderr_to_stdout": True, "wckey": None}


def check_client() -> None:
    """Raise ResourceError unless the commands of Slurm are here."""
    for name in ("sbatch", "srun", "scontrol", "squeue", "scancel"):
        if shutil.which(name) is None:
            raise ResourceError(f"launcher.kind: slurm, but there is no {name} here; start the run on a login node")


def check_job(launcher: LauncherConfig) -> None:
    """Raise ResourceError for a job that Slurm would refuse or never start, or where no controller answers.

    A time limit beyond the partition's is found only where Slurm enforces it at submission (EnforcePartLimits).
    """
    from submitit import SlurmExecutor

    check_client()
    with TemporaryDirectory(prefix="mcaflow-") as folder:
        executor = SlurmExecutor(folder)
        executor.update_parameters(**_options("mcaflow-check", launcher))
        script = Path(folder, "job.sh")
        script.write_text(executor._make_submission_file_text("true", "check"))
        found = run_client("sbatch", "--test-only", str(script))
    if found.returncode == 0:
        return
    reason = refusal(found.stderr)
    # Slurm counts the nodes that are up. A job that needs one that is down or drained waits for it.
    if "not available" in reason and run_client("sinfo", "--noheader", "--list-reasons").stdout.strip():
        return
    raise ResourceError(f"launcher.slurm: sbatch refuses the job: {reason}")


def refusal(text: str) -> str:
    """What sbatch says, on one line."""
    return " ".join(text.replace("sbatch: error: ", "").replace("allocation failure: ", "").split())


def run_client(*command: str) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]} did not answer within 60 s")
