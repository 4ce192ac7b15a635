"""Jobs: one function of `mca_lib` in a child process, with a JSON spec in and a JSON result out.

The child is `python -m mca_lib.job NAME SPEC.json RESULT.json`, and RESULT.json is one of

    {"ok": true, "result": {...}}
    {"ok": false, "kind": "user" | "internal", "type": ..., "message": ..., "traceback": ...}
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mca_lib import errors
from tasks.errors import StageFailed, UserError
from tasks.process import CommandFailed, redact, run_command, secret_in


def run_job(
    name: str,
    spec: dict[str, Any],
    *,
    folder: Path,
    run: Callable[..., None] = run_command,
    **options: Any,
) -> dict[str, Any]:
    """Run job `name` of `mca_lib.job` and return its result.

    Args:
        folder: Gets NAME.spec.json, NAME.result.json, NAME.log.
        options: As of `run_command`.

    Raises:
        UserError: the job found a mistake of the user; of the class that the job names.
        StageFailed: the job failed otherwise; with its message and the end of its traceback.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spec_path, result_path, log_path = (folder / f"{name}.{end}" for end in ("spec.json", "result.json", "log"))
    text = json.dumps(spec, indent=1, allow_nan=False)
    if secret := secret_in(text):
        raise StageFailed(f"{name}: the value of {secret} is in the spec of the job, a file; pass it by environment")
    spec_path.write_text(text)
    result_path.unlink(missing_ok=True)
    failure: CommandFailed | None = None
    try:
        argv = [sys.executable, "-m", "mca_lib.job", name, str(spec_path), str(result_path)]
        run(argv, log_path=log_path, **options)
    except CommandFailed as error:
        failure = error
    outcome = _read(result_path)
    if outcome is None or (outcome.get("ok") is True and failure):
        raise StageFailed(str(failure)) if failure else StageFailed(f"{name}: ended without a result; log: {log_path}")
    if outcome.get("ok") is True:
        return outcome["result"]
    message = redact(str(outcome.get("message", "no message")))
    if outcome.get("kind") == "user":
        raise _user_error(outcome.get("type"), message)
    tail = "\n".join(redact(str(outcome.get("traceback") or "")).splitlines()[-15:])
    raise StageFailed(f"{name}: {outcome.get('type', 'error')}: {message}; log: {log_path}\n{tail}".rstrip())


def _read(path: Path) -> dict[str, Any] | None:
    try:
        outcome = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return outcome if isinstance(outcome, dict) else None


def _user_error(kind: Any, message: str) -> UserError:
    found = getattr(errors, str(kind), None)
    wanted = found if isinstance(found, type) and issubclass(found, UserError) else UserError
    return wanted(message)
