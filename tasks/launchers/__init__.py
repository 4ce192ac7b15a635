"""How the ranks of a training are started: one command for each kind of launcher, all else alike.

    kind    command                    the ranks are
    local   mca_lib.launch             on this machine
    nodes   mca_lib.nodes head         on this machine and on those where `mcaflow agent` runs
    slurm   tasks.launchers.slurm_run  in a job, which the command submits and waits for

Each command is a supervised child (`tasks.process`), so logs, progress and the end are the same: SIGTERM makes the
ranks write a checkpoint and end with 143, and nothing outlives the stage. A failure is raised as its cause: a mistake
of the user that a rank or the launcher found, what befell a machine or the job, or the first rank that failed.
"""

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mca_lib import errors
from mca_lib.errors import UserError
from mca_lib.launch_plan import LaunchPlan
from mca_lib.rank_process import ERRORS_VARIABLE, first_failure
from tasks.contract import StageContext
from tasks.errors import StageFailed
from tasks.launchers import slurm
from tasks.process import GRACE_SECONDS, PROGRESS, CommandFailed, progress_file, redact
from tasks.training_config import LauncherConfig

PLAN_NAME = "launch.json"
TRACEBACK_LINES = 25


class Command(NamedTuple):
    """What a kind of launcher runs, and the seconds that it may take to end after SIGTERM."""

    argv: list[str]
    grace: float = GRACE_SECONDS


def launch(
    ctx: StageContext,
    launcher: LauncherConfig,
    module: str,
    arguments: Path,
    *,
    env: Mapping[str, str] | None = None,
    secrets: Sequence[str] = (),
    log_name: str,
) -> None:
    """Run `python -m MODULE ARGUMENTS` in all ranks to their end.

    `env` goes to all ranks; `secrets` names variables that look like secrets and may reach ranks of the kind local.

    Raises:
        UserError: what the first rank found, or the launcher: machines that did not come, a job that was refused.
        StageFailed: a rank, a machine or the job failed.
    """
    failures = ctx.work / "failures"
    shutil.rmtree(failures, ignore_errors=True)
    failures.mkdir()
    plan = LaunchPlan(
        module=module,
        arguments=str(arguments),
        logs=str(ctx.logs),
        log_name=log_name,
        nproc_per_node=launcher.nproc_per_node,
        nnodes=launcher.nnodes,
        max_restarts=launcher.max_restarts,
        env=_environment(launcher)
        | {ERRORS_VARIABLE: str(failures), PROGRESS: str(progress_file(ctx.logs / f"{log_name}.log"))}
        | dict(env or {}),
    )
    command = _COMMANDS[launcher.kind](ctx, launcher, plan)
    local = secrets if launcher.kind == "local" else ()
    try:
        ctx.run_command(command.argv, log_name=log_name, env=plan.env, secrets=local, grace=command.grace)
    except CommandFailed as error:
        failure = first_failure(failures)
        if failure is None:
            raise
        raise _as_exception(failure, log_name, error.log_path) from None


def _local(ctx: StageContext, launcher: LauncherConfig, plan: LaunchPlan) -> Command:
    return Command(plan.on_this_machine)


def _nodes(ctx: StageContext, launcher: LauncherConfig, plan: LaunchPlan) -> Command:
    path = ctx.work / PLAN_NAME
    path.write_text(plan.to_json())
    head = [sys.executable, "-m", "mca_lib.nodes", "head", str(launcher.rdzv_endpoint), str(path)]
    return Command([*head, f"--patience={launcher.join_seconds}"])


def _slurm(ctx: StageContext, launcher: LauncherConfig, plan: LaunchPlan) -> Command:
    folder = ctx.work / "slurm"
    folder.mkdir(exist_ok=True)
    (folder / slurm.REQUEST).write_text(json.dumps(slurm.request(ctx.tag, launcher, plan), indent=1))
    return Command([sys.executable, "-m", "tasks.launchers.slurm_run", str(folder)], slurm.GRACE_SECONDS + 30.0)


_COMMANDS: dict[str, Callable[[StageContext, LauncherConfig, LaunchPlan], Command]] = {
    "local": _local,
    "nodes": _nodes,
    "slurm": _slurm,
}


def _environment(launcher: LauncherConfig) -> dict[str, str]:
    """Of every rank on every machine."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if launcher.interface else ()
    return {"OMP_NUM_THREADS": str(launcher.omp_num_threads)} | dict.fromkeys(names, launcher.interface or "")


def _as_exception(failure: dict[str, Any], name: str, log_path: Path) -> Exception:
    """A failure as this process raises it: one line for a user's mistake, a traceback for a rank's defect."""
    message = redact(failure["message"])
    if failure["kind"] == "user":
        kind = getattr(errors, failure["type"], UserError)
        return kind(message) if issubclass(kind, UserError) else UserError(message)
    if failure["kind"] == "launcher":
        return StageFailed(f"{name}: {message}; log: {log_path}")
    trace = "\n".join(redact(failure["traceback"]).splitlines()[-TRACEBACK_LINES:])
    return StageFailed(f"{name}: rank {failure['rank']}: {failure['type']}: {message}; log: {log_path}\n{trace}")
