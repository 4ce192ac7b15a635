"""Supervised child processes: they leave a log, report progress, and never outlive the stage.

Four nets, each for a way in which the others fail:
1. cancel, Ctrl-C, an error in the stage: SIGTERM to the command, `grace` seconds, then SIGKILL to all of it;
2. the parent is killed: the guardian (`tasks/guardian.py`) kills the tree, sessions of their own included;
3. the guardian is killed too: a tag in the environment finds what is left, at the next attempt at the latest;
4. `terminate_all` from any thread: stages that run in threads receive no signals.

Output goes to a file, not a pipe: an orphan cannot hold a pipe open, and a slow reader cannot stall a trainer.
"""

import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks import cancel, guardian
from tasks.errors import StageFailed
from tasks.tail import LineTail, last_lines

TAG = "MCAFLOW_TAG"
PROGRESS = "MCAFLOW_PROGRESS"
GRACE_SECONDS = 20.0
_log = logging.getLogger("mcaflow.process")
_POLL_SECONDS = 0.1
_CHECK_SECONDS = 1.0
_SECRET_NAME = re.compile(r"(TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIALS?|AUTH_STRING|_KEY)$", re.IGNORECASE)


class CommandFailed(StageFailed):
    """A command ended with a status other than 0."""

    def __init__(self, what: str, status: int, log_path: Path) -> None:
        self.status = status
        self.log_path = log_path
        tail = redact(last_lines(log_path, 15))
        super().__init__(f"{what}: {_ending(status)}; log: {log_path}" + (f"\n{tail}" if tail else ""))


def run_command(
    argv: Sequence[str],
    *,
    tag: str,
    log_path: Path,
    env: Mapping[str, str] | None = None,
    secrets: Sequence[str] = (),
    cwd: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
    check: Callable[[], None] | None = None,
    grace: float = GRACE_SECONDS,
) -> None:
    """Run a command to its end.

    Args:
        tag: Marks the process and all it starts; processes that carry it from an earlier attempt are killed first.
        log_path: Gets stdout and stderr, appended.
        env: Added to this process's environment, of which variables that look like secrets are left out.
        secrets: Names of such variables that the command may see all the same.
        on_line: Called with each line of output.
        on_progress: Called with each JSON line that the command appends to the file named by `MCAFLOW_PROGRESS`.
        check: Called about once a second; an exception from it ends the command and is passed on.
        grace: Seconds between SIGTERM and SIGKILL.

    Raises:
        CommandFailed: the command ended with another status than 0.
        Cancelled: `terminate_all` was called.
    """
    if check:
        check()
    kill_tagged(tag)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    progress_path = progress_file(log_path)
    progress_path.write_bytes(b"")
    child_env = _environment(env or {}, secrets)
    child_env |= {TAG: tag, PROGRESS: str(progress_path), "PYTHONUNBUFFERED": "1"}
    lines = LineTail(log_path, at_end=True) if on_line else None
    reports = LineTail(progress_path) if on_progress else None

    def forward(*, ended: bool = False) -> None:
        for line in lines.read(ended=ended) if lines and on_line else ():
            on_line(line)
        for line in reports.read(ended=ended) if reports and on_progress else ():
            if (report := _json_object(line)) is not None:
                on_progress(report)

    with cancel.scope() as scope:
        process = _start([str(part) for part in argv], child_env, log_path, cwd)
        try:
            _wait(process, scope, forward, check)
            forward(ended=True)
        except BaseException:
            _stop(process, grace)
            forward(ended=True)  # what it said of its end
            raise
        finally:
            # Whatever happened: nothing of this command is left.
            kill_tagged(tag)
    if process.returncode != 0:
        raise CommandFailed(Path(argv[0]).name, process.returncode, log_path)


def progress_file(log_path: Path) -> Path:
    """Where a command with this log appends its progress."""
    return log_path.with_suffix(".progress")


def terminate_all() -> None:
    """End every command and every stage that this process is running, in whatever thread; they raise Cancelled.

    Returns at once, and is safe in a signal handler; commands get their grace in their own threads.
    """
    cancel.cancel_all()


def kill_tagged(tag: str, variable: str = TAG) -> list[int]:
    """SIGKILL every process that carries the tag in its environment, but this one and those it descends from, and wait
    until they are gone. Returns their pids.
    """
    import psutil

    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    victims = []
    for process in psutil.process_iter():
        try:
            if process.pid not in mine and process.environ().get(variable) == tag:
                process.kill()
                victims.append(process)
        except psutil.Error:
            continue  # gone meanwhile, or another user's
    psutil.wait_procs(victims, timeout=10)
    return [process.pid for process in victims]


def redact(text: str) -> str:
    """The text without the values of this process's secret environment variables."""
    for name, value in _secrets().items():
        text = text.replace(value, f"<{name}>")
    return text


def secret_in(text: str) -> str | None:
    """Name of an environment variable whose value is a token and stands in the text; None when there is none."""
    # Shorter or wordier values (MY_KEY=/data/key) also occur by chance.
    tokens = {name: value for name, value in _secrets().items() if re.fullmatch(r"[\w.~+=-]{16,}", value)}
    return next((name for name, value in tokens.items() if value in text), None)


def _secrets() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if len(value) >= 8 and _SECRET_NAME.search(name)}


def _environment(extra: Mapping[str, str], secrets: Sequence[str]) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name in secrets or not _SECRET_NAME.search(name)}
    return own | dict(extra)


def _start(argv: list[str], env: dict[str, str], log_path: Path, cwd: Path | None) -> subprocess.Popen:
    wrapped = [sys.executable, "-I", "-S", guardian.__file__, str(os.getpid()), *argv]
    with open(log_path, "ab") as log:
        return subprocess.Popen(
            wrapped, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _wait(
    process: subprocess.Popen, scope: cancel.Scope, forward: Callable[..., None], check: Callable[[], None] | None
) -> None:
    """Block until the process ends; forward its output meanwhile."""
    descriptor = os.pidfd_open(process.pid)
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        next_check = 0.0
        while not ended.poll(_POLL_SECONDS * 1000):
            scope.check()
            forward()
            if check and time.monotonic() >= next_check:
                check()
                next_check = time.monotonic() + _CHECK_SECONDS
        process.wait()
    finally:
        os.close(descriptor)


def _stop(process: subprocess.Popen, grace: float) -> None:
    """SIGTERM, grace, SIGKILL to the whole tree. A second interrupt cuts the grace short."""
    try:
        process.send_signal(signal.SIGTERM)
        process.wait(grace)
    except subprocess.TimeoutExpired:
        _log.warning("process %d did not end within %g s of SIGTERM; killing it", process.pid, grace)
    finally:
        if process.poll() is None:
            process.send_signal(guardian.KILL_ALL)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _json_object(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _ending(status: int) -> str:
    number = -status if status < 0 else status - 128
    if number in signal.valid_signals():
        name = signal.Signals(number).name
        hint = " (often the kernel, out of memory)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"exit status {status}"
