"""A deployment that runs by the clock, on data that do not change, and then do; two of its runs at once.

    python -m tests.acceptance.scheduled --folder /tmp/scheduled [--runs 20]

The first two runs are made by the server's scheduler (a cron of every minute), the others through the API, as the
scheduler makes them, one when the last has ended. None may compute a stage. Printed are the wall time of each (of the
flow, and from its being due to its end) and what it adds to the database and to the store. Then one row of the data is
changed. Last, two runs are started at the same moment, with `--overlap refuse` and with `queue`. About 15 minutes.
"""

import json
import sqlite3
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort

from tasks.collect import folder_size
from tests.acceptance.harness import SHORTENED, STAGES, Complaint, Workplace, check, parser, show
from tests.acceptance.service import Service, ServiceRun, await_true

NAME = "mcaflow/nightly-scheduled"
EVERY_MINUTE, NEVER = "* * * * *", "0 0 29 2 1"
AFTER_A_ROW = ("dataset", "train", "export", "evaluate")


@dataclass(frozen=True)
class Measured:
    """One run, and what it has added."""

    by: str
    flow_seconds: float
    seconds: float
    """From being due to its end."""
    database: int
    store: int
    """Bytes."""

    def row(self, number: int) -> tuple[object, ...]:
        times = f"{self.flow_seconds:.1f} s", f"{self.seconds:.1f} s"
        return number, self.by, *times, f"{self.database / 1024:.0f} KiB", f"{self.store / 1024:.1f} KiB"


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=20)
    given = arguments.parse_args()
    place = replace(Workplace.make(given.folder), fields=SHORTENED)
    wrong = 0
    service = Service(place, "service")
    with service.running("--worker"):
        for part in (_unchanged, _changed, _refused, _queued):
            try:
                part(service, given.runs)
            except Complaint as complaint:
                print(f"WRONG {part.__name__}: {complaint}", flush=True)
                wrong += 1
    print(f"{wrong} wrong")
    return 1 if wrong else 0


def _unchanged(service: Service, count: int) -> None:
    store = service.place.folder / "store"
    service.place.finish(store)
    _deploy(service, EVERY_MINUTE, store)
    found: list[Measured] = []
    sizes = _database(service), folder_size(store)
    by_clock: list[FlowRun] = []
    while len(found) < count:
        if len(found) < 2:
            await_true(lambda: len(_ended(service, by_clock)) > len(found), 180, "the scheduler starts no run")
            run, by = by_clock[len(found)], "scheduler"
            if len(found) == 1:
                _deploy(service, NEVER, store)
        else:
            started = service.run(NAME)
            started.await_end(120)
            run, by = started.read(), "API"
        computed = _computed(ServiceRun(service, run.id, store))
        check(
            run.state_name == "Completed" and not computed, f"a run on unchanged data is {run.state_name}: {computed}"
        )
        now = _database(service), folder_size(store)
        times = run.total_run_time.total_seconds(), (run.end_time - run.expected_start_time).total_seconds()
        found.append(Measured(by, *times, now[0] - sizes[0], now[1] - sizes[1]))
        sizes = now
    heading = ("run", "made by", "flow", "due to end", "database", "store")
    show(f"{count} runs on unchanged data: no stage computed", heading, [m.row(n) for n, m in enumerate(found, 1)])
    flow = statistics.median(m.flow_seconds for m in found)
    mean = statistics.mean(m.database for m in found), statistics.mean(m.store for m in found)
    print(f"median of the flow {flow:.1f} s; mean growth a run: {mean[0] / 1024:.0f} KiB, {mean[1] / 1024:.1f} KiB")


def _changed(service: Service, count: int) -> None:
    data = service.place.data
    rows = json.loads(data.read_text())
    rows[0]["output"] += " Indeed."
    data.write_text(json.dumps(rows))
    run = service.run(NAME)
    state, seconds = run.await_end(600)
    check(state == "Completed", f"{state}: {run.read().state.message}")
    computed = _computed(run)
    check(tuple(s for s in STAGES if s in computed) == AFTER_A_ROW, f"one changed row: computed {computed}")
    print(f"one changed row: {', '.join(AFTER_A_ROW)} computed, the others Cached; {seconds:.0f} s")


def _refused(service: Service, count: int) -> None:
    first, second = _race(service, "refuse", 2e-3)
    refused = [run for run in (first, second) if run.state() == "Cancelled"]
    check(len(refused) == 1, f"refuse: {first.state()} and {second.state()}")
    (done,) = {first, second} - set(refused)
    check(done.state() == "Completed", f"refuse: the other one is {done.state()}")
    check(not refused[0].stages(), f"the refused run has computed {refused[0].stages()}")
    message = refused[0].read().state.message
    check(bool(message), "no reason why the run was refused")
    print(f"refuse: one of two runs at once is Completed, the other Cancelled: {message}")


def _queued(service: Service, count: int) -> None:
    first, second = sorted(_race(service, "queue", 3e-3), key=lambda run: run.read().start_time)
    check((first.state(), second.state()) == ("Completed",) * 2, f"queue: {first.state()} and {second.state()}")
    waited = (second.read().start_time - first.read().end_time).total_seconds()
    check(waited >= 0, f"the second has begun {-waited:.1f} s before the end of the first")
    check(not _computed(second), f"the second has computed {_computed(second)}")
    print(
        f"queue: both are Completed; the second began {waited:.1f} s after the end of the first, and computed nothing"
    )


def _race(service: Service, overlap: str, rate: float) -> tuple[ServiceRun, ServiceRun]:
    """Two runs with something to train, made at once; both at their end."""
    store = service.place.folder / "store"
    _deploy(service, NEVER, store, "--overlap", overlap, training__learning_rate=rate)
    runs = service.run(NAME, until="train"), service.run(NAME, until="train")
    for run in runs:
        run.await_end(600)
        run.await_nothing_left()
    return runs


def _deploy(service: Service, cron: str, store: Path, *flags: str, **fields: object) -> None:
    service.deploy("nightly", "--cron", cron, *flags, store__path=str(store), **fields)


def _ended(service: Service, known: list[FlowRun]) -> list[FlowRun]:
    """Adds runs of the deployment that have ended, in order of their end."""
    with service.client as client:
        deployment = client.read_deployment_by_name(NAME)
        of_it = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment.id]))
        found = client.read_flow_runs(flow_run_filter=of_it, sort=FlowRunSort.EXPECTED_START_TIME_ASC, limit=50)
    ids = {run.id for run in known}
    known += [run for run in found if run.state and run.state.is_final() and run.id not in ids]
    return known


def _computed(run: ServiceRun) -> Mapping[str, str]:
    """Stages that were not Cached; all must be there."""
    stages = run.stages()
    check(bool(stages), "the run has no stages")
    return {stage: state for stage, state in stages.items() if state != "Cached"}


def _database(service: Service) -> int:
    """Bytes of the database that are in use, once the last events are written."""
    time.sleep(2)
    with sqlite3.connect(f"file:{service.home / 'prefect.db'}?mode=ro", uri=True) as database:
        (pages,), (free,), (size,) = (
            database.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "freelist_count", "page_size")
        )
    return (pages - free) * size


if __name__ == "__main__":
    sys.exit(main())
