"""Jobs of stages as forks of the rank pool's server: the same work in a process of its own, that imports torch no more.

For tests of what stages do with what jobs say. `tests/flows` and `tests/tasks/test_run_job.py` have jobs that are
processes of their own from the start.
"""

import contextlib
import functools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import tasks.contract
from mca_lib import job
from tasks.jobs import run_job
from tasks.process import PROGRESS, CommandFailed, progress_file


@contextlib.contextmanager
def forked_jobs(ranks: Callable[..., list[Any]]) -> Iterator[None]:
    """Within it every job of a `StageContext` is forked."""
    one_at_a_time = threading.Lock()
    # The server ends with the thread that started it, and stages run in threads that come and go.
    ranks(1, "os:getpid")

    def run(
        argv: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
        **_: Any,
    ) -> None:
        progress = progress_file(log_path)
        progress.write_bytes(b"")
        with one_at_a_time:
            name, *files = argv[argv.index("mca_lib.job") + 1 :]
            (status,) = ranks(1, _run, [name, *files], {**(env or {}), PROGRESS: str(progress)}, log_path)
        for line in progress.read_text().splitlines() if on_progress else ():
            on_progress(json.loads(line))
        if status:
            raise CommandFailed(name, status, log_path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.contract, "run_job", functools.partial(run_job, run=run))
        yield


def _run(argv: list[str], env: dict[str, str], log_path: Path) -> int:
    os.environ.update(env)
    with open(log_path, "a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        return job.main(argv)
