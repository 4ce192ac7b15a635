"""What becomes of a run when something of the service dies: a real server, a real worker, a training under way.

    python -m tests.acceptance.kill_table --folder /tmp/kills [--case cancel …]

In each case the training is some steps beyond a checkpoint when it happens. Then: the final state and how long it took,
that no process of the run is left, no lease in the store and no slot of the GPU limit; Retry, as the UI does it, must
compute `train` alone, from the newest checkpoint, to the weights of every other case, bit for bit. Runs give a sign of
life every 30 s here (PREFECT_FLOWS_HEARTBEAT_FREQUENCY, the least), so a dead one is Crashed after two minutes, not
four. About 25 minutes.
"""

import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from prefect.states import Cancelling

from flows import gpu
from tests.acceptance.harness import STAGES, Complaint, Workplace, artifacts, check, newest_checkpoint, parser, show
from tests.acceptance.service import Service, ServiceRun, await_true

TRAINING = {"training.max_steps": 60, "training.save_steps": 5, "launcher.nproc_per_node": 2}
HEARTBEAT = 30
SILENT = 4 * HEARTBEAT + 60
"""Seconds within which a run that nobody runs must be Crashed; the server looks every few seconds."""
AT_STEP = 8
LEASE_SECONDS = 300
"""For which Prefect holds a slot of a limit; a client renews it after three quarters."""


@dataclass(frozen=True)
class Case:
    """Something that happens to a run, and what must become of it."""

    happens: Callable[[ServiceRun], None]
    state: str
    within: float
    """Seconds to the final state."""
    resumes: bool = True
    """Whether Retry goes on from a checkpoint; False where the run itself comes to its end."""
    max_restarts: int = 0
    bare: bool = False
    """The worker is one that nobody starts again, and that is no child of `mcaflow server up`."""


def cancel(run: ServiceRun) -> None:
    with run.service.client as client:
        client.set_flow_run_state(run.id, Cancelling(message="Cancelled in the UI"))


def kill_flow(run: ServiceRun) -> None:
    _flow(run).kill()


def kill_worker(run: ServiceRun) -> None:
    run.service.worker().kill()


def kill_worker_and_flow(run: ServiceRun) -> None:
    flow = _flow(run)
    run.service.worker().kill()
    if flow.is_running():
        flow.kill()


def kill_server(run: ServiceRun) -> None:
    run.service.server().kill()
    await_true(lambda: not run.service.answers(), 30, "the server lives on", poll=0.05)
    await_true(run.service.answers, 120, "the server is not started again")


def kill_rank(run: ServiceRun) -> None:
    ranks = [process for process in run.family() if process.environ().get("LOCAL_RANK") == "1"]
    check(bool(ranks), "no rank 1")
    ranks[0].kill()


def terminate_worker(run: ServiceRun) -> None:
    run.service.worker().send_signal(signal.SIGTERM)


def interrupt_worker(run: ServiceRun) -> None:
    run.service.worker().send_signal(signal.SIGINT)


CASES: dict[str, Case] = {
    "cancel": Case(cancel, "Cancelled", 60),
    "SIGKILL flow": Case(kill_flow, "Crashed", 60),
    "SIGKILL rank": Case(kill_rank, "Failed", 90),
    "SIGKILL rank, max_restarts 1": Case(kill_rank, "Completed", 240, resumes=False, max_restarts=1),
    "SIGKILL server": Case(kill_server, "Completed", 240, resumes=False),
    "SIGKILL worker": Case(kill_worker, "Crashed", SILENT),
    "SIGKILL worker and flow": Case(kill_worker_and_flow, "Crashed", SILENT),
    "SIGKILL bare worker": Case(kill_worker, "Crashed", SILENT, bare=True),
    "SIGTERM bare worker": Case(terminate_worker, "Crashed", SILENT, bare=True),
    "SIGINT bare worker": Case(interrupt_worker, "Crashed", SILENT, bare=True),
}
RESTART = "SIGKILL server, limits held"
SECOND = "second server"


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--case", action="append", choices=[*CASES, RESTART, SECOND])
    given = arguments.parse_args()
    place = replace(Workplace.make(given.folder), fields=TRAINING)
    heading = ("what", "state", "after", "processes gone", "slots", "leases", "Retry computes", "from step")
    rows: list[tuple[object, ...]] = []
    digests: set[str] = set()
    wrong = 0
    for name in given.case or [*CASES, RESTART, SECOND]:
        try:
            rows.append((name, *_row(place, name, digests)))
        except Complaint as complaint:
            rows.append((name, f"WRONG: {complaint}"))
            wrong += 1
        print(*rows[-1], sep=" | ", flush=True)
    if len(digests) > 1:
        print(f"WRONG: the trainings have {len(digests)} different results")
        wrong += 1
    show("what becomes of a run", heading, rows)
    print(f"{wrong} wrong")
    return 1 if wrong else 0


def _row(place: Workplace, name: str, digests: set[str]) -> tuple[object, ...]:
    slug = "".join(letter if letter.isalnum() else "-" for letter in name)
    service = Service(place, f"service-{slug}", PREFECT_FLOWS_HEARTBEAT_FREQUENCY=str(HEARTBEAT))
    bare = name in CASES and CASES[name].bare
    with service.running("--gpus", "2", *([] if bare else ["--worker"])):
        if name == SECOND:
            return ("refused", service.call("server", "up", "--port", str(service.port), expect=2).strip())
        if bare:
            service.start_worker()
        store = _before_training(place, slug)
        if name == RESTART:
            return _restart(service, store)
        return _case(CASES[name], service, store, digests)


def _case(case: Case, service: Service, store: Path, digests: set[str]) -> tuple[object, ...]:
    service.deploy("kills", store__path=str(store), launcher__max_restarts=case.max_restarts)
    run = service.run("mcaflow/kills", until="train")
    run.await_step(AT_STEP)
    check(_slots(service) == 2, f"{_slots(service)} slots are taken while two ranks train")
    checkpoint = newest_checkpoint(store)
    case.happens(run)
    happened = time.monotonic()
    gone = "" if not case.resumes else f"{run.await_nothing_left(60):.1f} s"
    state, _ = run.await_end(case.within)
    after = time.monotonic() - happened
    check(state == case.state, f"{state} instead of {case.state}: {run.read().state.message}")
    gone = gone or f"{run.await_nothing_left(60):.1f} s"
    leases, slots = run.leftovers(), _slots(service)
    retry, resumed = "", ""
    if case.resumes:
        newest = newest_checkpoint(store)
        check(newest >= checkpoint >= 5, f"checkpoint {newest} after {checkpoint}")
        if case.bare and not service.processes("worker start"):
            service.start_worker()
        run.retry()
        await_true(lambda: run.state() not in (case.state, "AwaitingRetry"), 60, "the retry is not taken up")
        ended, _ = run.await_end(300)
        check(ended == "Completed", f"the retry is {ended}: {run.read().state.message}")
        resumed = str(run.resumed_from())
        check(int(resumed) == newest, f"went on from {resumed}, not from {newest}")
        retry = _computed(run)
        check(retry == "train", f"the retry computed {retry}")
    else:
        check(_computed(run) == "train", f"computed {_computed(run)}")
    run.await_nothing_left()
    check(not run.leftovers(), f"left in the store: {run.leftovers()}")
    await_true(lambda: _slots(service) == 0, LEASE_SECONDS + 60, f"{_slots(service)} slots stay taken", poll=2)
    digests.add(artifacts(store)["train"].digest)
    return state, f"{after:.0f} s", gone, slots, len(leases), retry, resumed


def _restart(service: Service, store: Path) -> tuple[object, ...]:
    """A run that outlasts what Prefect gives a slot without renewal, through a restart of the server."""
    long = {"training__max_steps": 100_000, "training__save_steps": 1000}
    service.deploy("limits", "--cron", "0 0 1 1 *", store__path=str(store), **long)
    run = service.run("mcaflow/limits-scheduled", until="train")
    run.await_step(AT_STEP)
    kill_server(run)
    restarted = time.monotonic()
    while time.monotonic() - restarted < LEASE_SECONDS:
        check(run.state() == "Running", f"{run.state()} {time.monotonic() - restarted:.0f} s after the restart")
        check(bool(run.family()), "its processes are gone")
        time.sleep(5)
    check(_slots(service) == 2, f"{_slots(service)} slots of the GPU limit are taken after {LEASE_SECONDS} s")
    refused = service.run("mcaflow/limits-scheduled", until="train")
    state, _ = refused.await_end(60)
    check(state == "Cancelled", f"a second run beside it is {state}")
    cancel(run)
    happened = time.monotonic()
    state, _ = run.await_end(60)
    gone = run.await_nothing_left()
    await_true(lambda: _slots(service) == 0, 60, "slots stay taken")
    after = f"runs on for {LEASE_SECONDS} s, then cancelled in {time.monotonic() - happened:.0f} s"
    return state, after, f"{gone:.1f} s", _slots(service), len(run.leftovers()), "", ""


def _computed(run: ServiceRun) -> str:
    return ", ".join(stage for stage, state in run.stages().items() if state == "Completed")


def _slots(service: Service) -> int:
    with service.client as client:
        return client.read_global_concurrency_limit_by_name(gpu.LIMIT).active_slots


def _flow(run: ServiceRun) -> psutil.Process:
    return run.family()[0]


def _before_training(place: Workplace, slug: str) -> Path:
    """A store in which everything is that comes before training."""
    reference = place.folder / "before"
    if not (reference / "convert").is_dir():
        place.finish(reference, "--until", "convert")
        place.finish(reference, "--until", "dataset")
    store = place.folder / f"store-{slug}"
    shutil.rmtree(store, ignore_errors=True)
    for stage in STAGES[: STAGES.index("train")]:
        shutil.copytree(reference / stage, store / stage)
    return store


if __name__ == "__main__":
    sys.exit(main())
