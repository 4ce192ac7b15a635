"""torchrun on several machines: the *head*, which hosts the store at which they meet, and those that *join* it.

    python -m mca_lib.nodes head HOST:PORT PLAN.json
    python -m mca_lib.nodes join HOST:PORT [--keep] [--run ID]

Every machine runs a supervisor (this module), and that runs torchrun, whose rendezvous uses the same store. torchrun
alone does not notice a machine that is gone, nor pass a signal on to the others; the supervisors do, by the keys of
`mca_lib.meeting`.

Whoever reaches the endpoint can run code on all machines (torchrun unpickles what it finds in the store), so the head
binds to that one address and the network must be one that is trusted.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from mca_lib.errors import ResourceError
from mca_lib.launch import NarrowStore
from mca_lib.launch_plan import LaunchPlan, split_endpoint
from mca_lib.meeting import FAREWELL_SECONDS, HeadGone, Meeting
from mca_lib.progress import tell
from mca_lib.rank_process import ERRORS_VARIABLE, first_failure, report_launcher_failure

BEAT_SECONDS = 1.0
LOST_SECONDS = 30.0
"""A machine that has not been heard of for so long is lost, unless the head says otherwise (`--lost`)."""
STOPPED = 128 + signal.SIGTERM


class StopRequest:
    """Whether SIGTERM or SIGINT came; they end nothing by themselves."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: object) -> None:
        self.requested = True


def host(
    endpoint: str, plan: LaunchPlan, stop: StopRequest, *, run: str, patience: float, lost_after: float = LOST_SECONDS
) -> int:
    """The head's part: wait `patience` seconds for the others, run this machine's ranks, judge. Returns the verdict.

    A machine that is silent for `lost_after` seconds is lost.
    """
    failures = Path(plan.env[ERRORS_VARIABLE])
    address, port = split_endpoint(endpoint)
    try:
        store = NarrowStore(address, port, None, True, wait_for_workers=False)
    except OSError as error:
        reason = f"launcher.rdzv_endpoint: {endpoint}: {error.strerror or error}; name a free port of this machine"
        report_launcher_failure(failures, reason, ResourceError(reason))
        return 2
    store.add("mcaflow/members", 1)
    store.set("mcaflow/run", json.dumps({"run": run, "plan": plan.to_json(), "lost_after": lost_after}))
    meeting = Meeting(store, 0, plan, run, lost_after)
    problem = _await_members(meeting, endpoint, stop, patience)
    if problem is None and not stop.requested:
        meeting.go()
        own, problem = _run_ranks(meeting, endpoint, address, stop)
        meeting.end(own)
        while len(meeting.ended) < plan.nnodes and (late := meeting.lost()) is None:
            meeting.beat()
            time.sleep(0.1)
        problem = problem or (late if len(meeting.ended) < plan.nnodes else _killed(meeting))
        verdict = 0 if set(meeting.ended.values()) == {0} and len(meeting.ended) == plan.nnodes else 1
    else:
        verdict = 2 if problem else STOPPED
    if verdict and meeting.stopped_by:
        verdict, problem = STOPPED, None if stop.requested else f"{meeting.stopped_by} was told to stop"
    if problem:
        report_launcher_failure(failures, problem, ResourceError(problem) if verdict == 2 else None)
    if verdict == 1 and (cause := first_failure(failures)) and cause["kind"] == "user":
        verdict = 2
    meeting.pronounce(verdict)
    return verdict


def join(endpoint: str, stop: StopRequest, *, keep: bool, run: str | None = None) -> int:
    """Take part in the run at an endpoint, or with `keep` in one after the other; returns the last verdict.

    A run that has its machines already is waited for to end. `run` names the only run to take part in.
    """
    former: set[str] = set()
    print(f"waiting for a run at {endpoint}", flush=True)
    while not stop.requested:
        meeting = _enter(endpoint, former, run)
        if meeting is None:
            time.sleep(BEAT_SECONDS)
            continue
        former.add(meeting.run)
        if meeting.place >= meeting.plan.nnodes:
            print(f"the run at {endpoint} has its {meeting.plan.nnodes} machines already", flush=True)
            if not keep:
                return 1
            continue
        print(f"joined as machine {meeting.place + 1} of {meeting.plan.nnodes}", flush=True)
        verdict = _take_part(meeting, endpoint, stop)
        print({0: "the run is done"}.get(verdict, f"the run ended with status {verdict}"), flush=True)
        if not keep:
            return verdict
    return STOPPED


def _await_members(meeting: Meeting, endpoint: str, stop: StopRequest, patience: float) -> str | None:
    """Wait until all machines are here; what is wrong if they do not come."""
    nnodes, told = meeting.plan.nnodes, 0
    deadline = time.monotonic() + patience
    while (here := meeting.members) < nnodes:
        if here != told:
            tell("info", f"{here} of {nnodes} machines are here; on the others: mcaflow agent {endpoint}")
            told = here
        if stop.requested:
            return None
        if time.monotonic() > deadline:
            return (
                f"launcher.nnodes: {here} of {nnodes} machines came within {patience:.0f} s; run "
                f"`mcaflow agent {endpoint}` on each of the others (launcher.join_seconds is how long to wait)"
            )
        meeting.beat()
        if lost := meeting.lost():
            return f"launcher.nnodes: {lost}, before all had come"
        time.sleep(0.2)
    return None


def _enter(endpoint: str, former: set[str], wanted: str | None) -> Meeting | None:
    """The meeting at an endpoint, with a place in it; None when there is none yet."""
    address, port = split_endpoint(endpoint)
    try:
        with socket.create_connection((address, port), timeout=5):
            pass
        store = TCPStore(address, port, None, False, timeout=timedelta(seconds=30), wait_for_workers=False)
        if not store.check(["mcaflow/run"]):
            return None
        found = json.loads(store.get("mcaflow/run"))
        if found["run"] in former or (wanted and found["run"] != wanted):
            return None
        place = store.add("mcaflow/members", 1) - 1
        return Meeting(store, place, LaunchPlan.from_json(found["plan"]), found["run"], found["lost_after"])
    except (OSError, RuntimeError, HeadGone):
        return None


def _take_part(meeting: Meeting, endpoint: str, stop: StopRequest) -> int:
    """One run of an agent; the run's verdict, or 1 when its head vanished."""
    try:
        while not meeting.may_go and meeting.verdict is None:
            if stop.requested:
                meeting.ask_to_stop()
                return STOPPED
            meeting.beat()
            time.sleep(0.1)
        if meeting.may_go:
            meeting.end(_run_ranks(meeting, endpoint, _own_address(endpoint), stop)[0])
        while (verdict := meeting.verdict) is None:
            meeting.beat()
            time.sleep(0.1)
        meeting.take_leave()
        return verdict
    except HeadGone as error:
        print(f"the run's machine does not answer any more: {error}", flush=True)
        return STOPPED if stop.requested else 1


def _run_ranks(meeting: Meeting, endpoint: str, address: str, stop: StopRequest) -> tuple[int, str | None]:
    """Run this machine's torchrun to its end: its exit status, and what befell another machine.

    Raises HeadGone; torchrun and its ranks are gone then, too.
    """
    plan = meeting.plan
    output = None
    if meeting.place:
        path = plan.log_of(f"node{meeting.place}-{socket.gethostname()}")
        try:
            output = open(path, "ab")  # noqa: SIM115 - closed with the process
        except OSError as error:
            name = meeting.describe(meeting.place)
            print(f"{name} cannot write {path}: {error.strerror}; the store must be on a file system that all see")
            return 2, None
    command = plan.on_one_of_many(endpoint, meeting.run, address)
    child = subprocess.Popen(command, env=os.environ | plan.env, stdout=output, stderr=output)
    try:
        problem, told, deadline = None, False, None
        while True:
            with suppress(subprocess.TimeoutExpired):
                status = child.wait(BEAT_SECONDS)
                return (1 if problem or deadline else status), problem
            meeting.beat()
            if stop.requested and not meeting.stopped_by:
                meeting.ask_to_stop()
            if meeting.stopped_by and not told:
                child.terminate()
                told = True
            if problem := problem or meeting.lost():
                child.kill()  # without that machine nothing can be saved
            elif any(meeting.ended.values()) and not told:
                # Most ranks have noticed and fail by themselves; those that wait for a dead peer are killed.
                deadline = deadline or time.monotonic() + FAREWELL_SECONDS
                if time.monotonic() > deadline:
                    child.kill()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        if output:
            output.close()


def _killed(meeting: Meeting) -> str | None:
    """The machine whose torchrun was killed, in words."""
    for place, status in meeting.ended.items():
        if status < 0:
            return f"torchrun on {meeting.describe(place)} was killed by {signal.Signals(-status).name}"
        if status == 2:
            return f"{meeting.describe(place)} cannot write into {meeting.plan.logs}: no file system that all see"
    return None


def _own_address(endpoint: str) -> str:
    """Of this machine, as the head sees it."""
    with socket.create_connection(split_endpoint(endpoint), timeout=30) as connection:
        return connection.getsockname()[0]


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m mca_lib.nodes", description=__doc__.splitlines()[0])
    roles = parser.add_subparsers(dest="role", required=True)
    head, member = roles.add_parser("head"), roles.add_parser("join")
    for role in (head, member):
        role.add_argument("endpoint")
        role.add_argument("--run", help="name of the run, the same on all machines")
    head.add_argument("plan", type=Path)
    head.add_argument("--patience", type=float, default=600.0, help="seconds to wait for the others")
    head.add_argument("--lost", type=float, default=LOST_SECONDS, help="seconds without a sign of life")
    member.add_argument("--keep", action="store_true", help="go on with the next run")
    arguments = parser.parse_args(argv)
    stop = StopRequest()
    if arguments.role == "join":
        return join(arguments.endpoint, stop, keep=arguments.keep, run=arguments.run)
    plan = LaunchPlan.from_json(arguments.plan.read_bytes())
    run = arguments.run or uuid.uuid4().hex
    return host(arguments.endpoint, plan, stop, run=run, patience=arguments.patience, lost_after=arguments.lost)


if __name__ == "__main__":
    sys.exit(main())
