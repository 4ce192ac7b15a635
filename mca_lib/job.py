"""One heavy piece of work in a process of its own: ``python -m mca_lib.job NAME SPEC.json RESULT.json``.

The caller learns the outcome from RESULT.json, never by parsing output:

    {"ok": true,  "result": {...}}
    {"ok": false, "kind": "user" | "internal", "type": "DataError", "message": "...", "traceback": "..."}

``kind`` is "user" for a :class:`mca_lib.errors.UserError`, whose message is all that a person needs. Progress goes as
JSON lines to the file that ``MCAFLOW_PROGRESS`` names. Exit code: 0, 2 (user error), 1 (defect).
"""

import argparse
import errno
import importlib
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mca_lib.errors import ResourceError, UserError

JOBS: dict[str, str] = {
    "resolve_model": "mca_lib.hub:resolve_model",
    "download_model": "mca_lib.hub:download_model",
    "upload_model": "mca_lib.hub_upload:upload_model",
    "dataset": "mca_lib.data.prepare:dataset",
    "convert": "mca_lib.converter.jobs:convert",
    "translate": "mca_lib.converter.jobs:translate",
    "export": "mca_lib.converter.jobs:export",
    "digest": "mca_lib.checkpoint.digest:digest",
    "verify_model": "mca_lib.verification.job:verify_model",
    "evaluate": "mca_lib.evaluate:evaluate",
}

type Progress = Callable[..., None]


def main(argv: list[str] | None = None) -> int:
    """Run one job; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m mca_lib.job", description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(JOBS))
    parser.add_argument("spec", type=Path, help="JSON file with the job's parameters")
    parser.add_argument("result", type=Path, help="JSON file to write the outcome to")
    arguments = parser.parse_args(argv)
    try:
        spec = json.loads(arguments.spec.read_text(encoding="utf-8"))
        outcome = {"ok": True, "result": _function(arguments.name)(spec, progress_writer())}
        code = 0
    except UserError as error:
        outcome, code = _failure(error, kind="user"), 2
    except Exception as error:
        resource = disk_error(error, f"the output of the job {arguments.name}")
        outcome, code = (_failure(resource, kind="user"), 2) if resource else (_failure(error, kind="internal"), 1)
    if code:
        print(outcome.get("traceback") if code == 1 else outcome["message"], file=sys.stderr)
    _write_atomically(arguments.result, outcome)
    return code


def progress_writer() -> Progress:
    """``progress(done, total, **metrics)``, appending one JSON line to the file named by ``MCAFLOW_PROGRESS``."""
    target = os.environ.get("MCAFLOW_PROGRESS")

    def progress(done: int, total: int, **metrics: Any) -> None:
        if target:
            line = json.dumps({"done": done, "total": total, **metrics}) + "\n"
            with open(target, "a", encoding="utf-8") as file:
                file.write(line)

    return progress


_DISK = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
}


def disk_cause(error: BaseException | None) -> OSError | None:
    """The disk's own error among those that led to this one: full, over quota or read-only; None without one.

    torch.save (2.15) ends with a RuntimeError of its archive ("unexpected pos") when the file refuses a write, and
    safetensors with one of Rust's errors, which end in their number.
    """
    while error is not None:
        found = _os_error(error)
        if found is not None and found.errno in _DISK:
            return found
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _os_error(error: BaseException) -> OSError | None:
    if isinstance(error, OSError):
        return error
    number = re.search(r"\(os error (\d+)\)$", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


def disk_error(error: BaseException, what: str = "a file") -> ResourceError | None:
    """The user's view of a disk that is full, over quota or read-only; None for any other error."""
    cause = disk_cause(error)
    if cause is None:
        return None
    reason = f"{_DISK[cause.errno]} while writing {cause.filename2 or cause.filename or what}"
    return ResourceError(f"{reason}; free space or choose another store.path, then run again")


def _function(name: str) -> Callable[[dict[str, Any], Progress], dict[str, Any]]:
    module, _, attribute = JOBS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def _failure(error: BaseException, *, kind: str) -> dict[str, Any]:
    trace = "".join(traceback.format_exception(error))
    return {"ok": False, "kind": kind, "type": type(error).__name__, "message": str(error), "traceback": trace}


def _write_atomically(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    os.replace(temporary, path)


if __name__ == "__main__":
    # An orderly end: what a job has begun to write goes with it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
