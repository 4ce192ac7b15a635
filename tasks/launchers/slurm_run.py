"""The launcher `slurm`: submits a job, waits for it, and ends with it. Runs as the stage's child:

    python -m tasks.launchers.slurm_run FOLDER        FOLDER/request.json has what to submit

The job is one task on each node, `tasks.launchers.slurm_node`. What this process does beside it:

    log, progress   the job writes progress where the stage reads it; its log is copied here line by line
    SIGTERM         passed on to the job (a pending one is cancelled), then `scancel` after a grace
    alive           a file that is touched while this process lives. The job ends itself, with a checkpoint, when it
                    grows old, so that it does not outlive a run that was killed
    a second run    finds the job by its name, which is that of the artifact: the same request is adopted, another one's
                    job is cancelled first; so no two jobs work in one folder

Nothing is pickled: submitit writes the batch script around a plain command.
"""

import json
import os
import shlex
import signal
import sys
import time
import uuid
from pathlib import Path

from mca_lib.errors import ResourceError
from mca_lib.launch_plan import LaunchPlan
from mca_lib.progress import tell
from mca_lib.rank_process import ERRORS_VARIABLE, report_launcher_failure
from tasks.launchers.slurm import (
    ALIVE,
    GRACE_SECONDS,
    OWNER,
    POLL_SECONDS,
    REQUEST,
    STATUS,
    STOPPED,
    JobState,
    Slurm,
    check_client,
    refusal,
    run_client,
)
from tasks.process import TAG
from tasks.tail import LineTail

_ENDINGS = {
    "TIMEOUT": "ran into its time limit (launcher.slurm.time_minutes); run again to go on from its checkpoint",
    "OUT_OF_MEMORY": "ran out of memory (launcher.slurm.mem_gb)",
    "NODE_FAIL": "lost a node; run again to go on from its checkpoint",
    "PREEMPTED": "was preempted and not requeued; run again to go on from its checkpoint",
    "CANCELLED": "was cancelled from outside",
    "DEADLINE": "could not start before its deadline",
    "BOOT_FAIL": "could not start: a node did not boot",
}


def main(folder: Path) -> int:
    """See the module; returns the exit status."""
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stop.append(number))
    # Processes of the job must not be taken for children of this machine's attempt.
    os.environ.pop(TAG, None)
    request = json.loads((folder / REQUEST).read_text())
    plan = LaunchPlan(**request["plan"])
    failures = Path(plan.env[ERRORS_VARIABLE])
    (folder / ALIVE).touch()
    me = uuid.uuid4().hex
    (folder / OWNER).write_text(me)
    try:
        slurm = _adopt(folder, request) or _submit(folder, request)
    except ResourceError as error:
        report_launcher_failure(failures, str(error), error)
        return 2
    state = _wait(slurm, folder, plan, stop)
    if stop:
        # A run that slept until another one took its lease, and the job with it, ends alone.
        if (folder / OWNER).read_text() == me:
            slurm.end(GRACE_SECONDS)
        return STOPPED
    if state.name == "COMPLETED":
        return 0
    if state.status == STOPPED:
        state = JobState("TIMEOUT" if _near_limit(slurm, request["notice"]) else "FAILED", state.reason, STOPPED)
    if state.name in _ENDINGS:
        report_launcher_failure(failures, f"job {slurm.job_id} {_ENDINGS[state.name]} ({state.name})")
    elif state.status == STOPPED:
        told = "was told to stop and wrote a checkpoint; run again to go on from it"
        report_launcher_failure(failures, f"job {slurm.job_id} {told}")
    elif state.name == "FORGOTTEN":
        report_launcher_failure(failures, f"job {slurm.job_id} is gone and left no status; run again")
    print(f"job {slurm.job_id}: {state.name} {state.reason} status {state.status}\n{_job_output(folder, slurm)}")
    return state.status or 1


def _submit(folder: Path, request: dict) -> Slurm:
    """Raises ResourceError when there is no Slurm, or it refuses the job."""
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    check_client()
    (folder / "submitted.json").unlink(missing_ok=True)
    (folder / STATUS).unlink(missing_ok=True)
    (folder / "submitit").mkdir(exist_ok=True)
    executor = SlurmExecutor(folder / "submitit")
    try:
        executor.update_parameters(**request["options"])
        # The one way of submitit's to a job without a pickled function; what it warns of, results, is not used.
        job = executor._submit_command(shlex.join([sys.executable, "-m", "tasks.launchers.slurm_node", str(folder)]))
    except (FailedJobError, FailedSubmissionError, OSError) as error:
        raise ResourceError(f"launcher.slurm: sbatch refused the job: {refusal(str(error))}") from None
    (folder / "submitted.json").write_text(json.dumps(request | {"job": job.job_id}))
    tell("info", f"job {job.job_id} was submitted to Slurm")
    return Slurm(folder, job.job_id)


def _adopt(folder: Path, request: dict) -> Slurm | None:
    """The job that an earlier run of the same work left, if it is what this run asks for; ends it otherwise."""
    check_client()
    name = request["options"]["job_name"]
    found = run_client("squeue", "--noheader", "--me", f"--name={name}", "--format=%i")
    if found.returncode:
        raise ResourceError(f"launcher.kind: slurm does not answer: {' '.join(found.stderr.split())}")
    for job_id in found.stdout.split():
        slurm = Slurm(folder, job_id)
        try:
            submitted = json.loads((folder / "submitted.json").read_text())
        except (OSError, ValueError):
            submitted = None  # the run was killed right after it had submitted
        if submitted == request | {"job": job_id} and slurm.state().active:
            tell("info", f"job {job_id} of an earlier run goes on")
            return slurm
        tell("warning", f"job {job_id} of an earlier run asked for something else; it is ended first")
        slurm.end(GRACE_SECONDS)
    return None


def _wait(slurm: Slurm, folder: Path, plan: LaunchPlan, stop: list[int]) -> JobState:
    """Until the job ends or this process is to stop; copies the job's log and says why it is pending."""
    lines = LineTail(plan.log_of("job"), at_end=False)
    interval, next_poll, said, ended = POLL_SECONDS[0], 0.0, "", False
    while True:
        os.utime(folder / ALIVE)
        for line in lines.read():
            print(line, flush=True)
        if not ended and (folder / STATUS).exists():
            ended, interval, next_poll = True, POLL_SECONDS[0], 0.0
        if time.monotonic() >= next_poll:
            state = slurm.state()
            note = f"{state.name} ({state.reason})" if state.name in ("PENDING", "UNKNOWN") else state.name
            if note != said and not state.ending:
                tell("info", f"job {slurm.job_id}: {note}")
                said = note
            if not state.active and not state.ending:
                for line in lines.read(ended=True):
                    print(line, flush=True)
                return state
            next_poll = time.monotonic() + interval
            interval = min(interval * 1.5, POLL_SECONDS[1])
        if stop:
            return state
        time.sleep(0.5)


def _near_limit(slurm: Slurm, notice: int) -> bool:
    """Whether the job was ended by the notice before its time limit, which may come a minute early."""
    found = run_client("scontrol", "show", "job", "--oneliner", slurm.job_id)
    fields = dict(part.split("=", 1) for part in found.stdout.split() if "=" in part)
    run, limit = (_seconds(fields.get(name, "")) for name in ("RunTime", "TimeLimit"))
    return run is not None and limit is not None and run >= limit - notice - 60


def _seconds(text: str) -> int | None:
    """`[days-]hours:minutes:seconds` of Slurm; None for UNLIMITED and the like."""
    days, _, clock = text.rpartition("-")
    try:
        hours, minutes, seconds = map(int, clock.split(":"))
        return (int(days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds
    except ValueError:
        return None


def _job_output(folder: Path, slurm: Slurm) -> str:
    """What the batch script and srun printed: why a task did not start, for example."""
    paths = sorted((folder / "submitit").glob(f"{slurm.job_id}_*.???"))
    return "\n".join(text for path in paths if (text := path.read_text(errors="replace").strip()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
