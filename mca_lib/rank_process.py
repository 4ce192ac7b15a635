"""One rank as a process: it never outlives its launcher, and it says why it failed.

A rank that fails writes `rank-<R>.json` into the directory that `MCAFLOW_RANK_ERRORS` names, in the format of
`mca_lib.job`'s results, plus the rank and the time. The launcher takes the earliest: the first rank to fail is the
cause, the others then lose their connections.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from mca_lib.errors import UserError
from mca_lib.job import disk_error

ERRORS_VARIABLE = "MCAFLOW_RANK_ERRORS"
LAUNCHER_FAILURE = "launcher.json"
PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """Have the kernel kill this process when the one that started it ends, in whatever way. Linux only."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        sys.exit(128 + signal.SIGKILL)  # it ended before the kernel knew that we wanted to be told


def as_user_error(error: BaseException) -> UserError | None:
    """The error if a user can mend it, a full disk included; None for a defect."""
    if isinstance(error, UserError):
        return error
    return disk_error(error)


def report_failure(error: BaseException) -> None:
    """Write this rank's failure for the launcher; does nothing where no launcher asked for it."""
    directory = os.environ.get(ERRORS_VARIABLE)
    if not directory:
        return
    user = as_user_error(error)
    rank = int(os.environ.get("RANK", "0"))
    failure = {
        "ok": False,
        "kind": "user" if user else "internal",
        "type": type(user or error).__name__,
        "message": str(user or error),
        "traceback": "".join(traceback.format_exception(error)),
        "rank": rank,
        "time": time.time(),
    }
    # A full disk may have no room for it; the error itself must be the one that goes on.
    with contextlib.suppress(OSError):
        _write(rank_failure(Path(directory), rank), failure)


def rank_failure(directory: Path, rank: int) -> Path:
    """Where a rank writes its failure."""
    return directory / f"rank-{rank}.json"


def report_launcher_failure(directory: Path, message: str, user: UserError | None = None) -> None:
    """Write what ended the ranks from outside: a machine that was lost, a job out of time, or a mistake of the user."""
    failure = {"ok": False, "kind": "user" if user else "launcher", "message": message, "time": time.time()}
    _write(directory / LAUNCHER_FAILURE, failure | {"type": type(user).__name__})


def first_failure(directory: Path) -> dict[str, Any] | None:
    """The cause among the failures that were written.

    A user's mistake goes before what followed from it, and what befell a machine before the ranks that then lost their
    connections; among ranks the earliest counts.
    """
    failures = [json.loads(path.read_text()) for path in directory.glob("*.json")]
    order = {"user": 0, "launcher": 1, "internal": 2}
    return min(failures, key=lambda failure: (order[failure["kind"]], failure["time"]), default=None)


def _write(path: Path, failure: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(failure))
    os.replace(temporary, path)
