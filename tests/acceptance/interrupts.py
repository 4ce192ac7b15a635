"""SIGTERM and Ctrl-C to `mcaflow run`, while stages run in threads and while it trains, on a Prefect server.

    python -m tests.acceptance.interrupts --folder /tmp/interrupts

The run must end soon, with 143 and 130, leave no process behind and no run `Running` on the server; training saves a
checkpoint at SIGTERM and goes on from it in the next run, which ends with the content of a run that nobody disturbed.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.acceptance.harness import (
    Complaint,
    Workplace,
    check,
    digests,
    forget_steps,
    newest_checkpoint,
    parser,
    show,
)
from tests.ports import free_port

END_SECONDS = 30.0
GONE_SECONDS = 10.0


@dataclass(frozen=True)
class Interruption:
    """A signal, when it is sent, and the exit status that it must lead to."""

    number: signal.Signals
    stage: str
    step: int
    status: int


INTERRUPTIONS = (
    Interruption(signal.SIGTERM, "dataset", 0, 143),
    Interruption(signal.SIGINT, "convert", 0, 130),
    Interruption(signal.SIGINT, "train", 5, 130),
    Interruption(signal.SIGTERM, "train", 8, 143),
)


def main() -> int:
    given = parser(__doc__).parse_args()
    # A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    place = Workplace.make(given.folder)
    reference = place.folder / "undisturbed"
    if not reference.is_dir():
        place.finish(reference)
    store = place.folder / "interrupted"
    shutil.rmtree(store, ignore_errors=True)
    rows: list[tuple[object, ...]] = []
    status = 0
    with _prefect_server(place) as api:
        place = replace(place, env={"PREFECT_API_URL": api})
        for interruption in INTERRUPTIONS:
            try:
                rows.append(_interrupt(place, store, interruption, api))
            except Complaint as complaint:
                rows.append((interruption.number.name, interruption.stage, f"FAILED: {complaint}"))
                status = 1
            print(rows[-1], flush=True)
        place.finish(store)
        rows.append(("-", "the last run", f"0, flow run {_last_state(api)}"))
    heading = ("signal", "during", "exit status", "ended in", "gone in", "checkpoint", "first step", "flow run")
    show("interrupted runs", heading, rows)
    if digests(store) != digests(reference):
        print("FAILED: other content than undisturbed")
        return 1
    return status


def _interrupt(place: Workplace, store: Path, what: Interruption, api: str) -> tuple[object, ...]:
    before = newest_checkpoint(store)
    forget_steps(store)
    run = place.start(store)
    check(run.await_stage(what.stage, step=what.step), f"{what.stage} was not reached:\n{run.output()}")
    time.sleep(1.0)  # into the work of the child process
    steps = run.trained_steps()
    began = time.monotonic()
    # As a terminal does it: to the whole foreground group. A SIGTERM comes from a supervisor, to one process.
    (os.killpg if what.number == signal.SIGINT else os.kill)(run.process.pid, what.number)
    status = run.wait()
    ended = time.monotonic() - began
    gone = run.seconds_until_gone()
    checkpoint, state = newest_checkpoint(store), _last_state(api)
    row = (what.number.name, what.stage, status, f"{ended:.1f} s", f"{gone:.2f} s", checkpoint, steps[0], state)
    if status < 0:
        status = 128 - status
    check(status == what.status, f"exit status {status}: {row}\n{run.output()}")
    check(ended <= END_SECONDS and gone <= GONE_SECONDS, f"too slow: {row}")
    check("Traceback" not in run.output(), f"a traceback: {row}\n{run.output()}")
    check(state not in ("Running", "Pending", "Scheduled"), f"flow run still {state}")
    check(not (complaint := place.verify(store)), complaint)
    if what.stage == "train":
        check(not before or steps[0] == before + 1, f"began at step {steps[0]}, checkpoint {before}")
        if what.number == signal.SIGTERM:
            check(checkpoint >= steps[-1], f"step {steps[-1]} was done, the newest checkpoint is {checkpoint}")
    return row


@contextlib.contextmanager
def _prefect_server(place: Workplace) -> Iterator[str]:
    """A Prefect server on a free port; yields the URL of its API."""
    port = free_port()
    command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(port), "--no-ui"]
    with open(place.folder / "server.log", "wb") as log:
        server = subprocess.Popen(
            command, env=place.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    api = f"http://127.0.0.1:{port}/api"
    try:
        while server.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{api}/health", timeout=5).close()
                break
            time.sleep(0.2)
        yield api
    finally:
        server.terminate()
        server.wait(30)


def _last_state(api: str) -> str:
    """Name of the state of the newest flow run."""
    body = json.dumps({"sort": "START_TIME_DESC", "limit": 1}).encode()
    request = urllib.request.Request(f"{api}/flow_runs/filter", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)[0]["state"]["name"]


if __name__ == "__main__":
    sys.exit(main())
