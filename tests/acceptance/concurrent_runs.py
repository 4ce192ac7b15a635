"""Several `mcaflow run` of one recipe on one store: each stage is computed once, and every run ends well.

    python -m tests.acceptance.concurrent_runs --folder /tmp/runs [--scenario two …]

two, three    started at the same moment on an empty store
late          the second is started while the first trains
takeover      one of two waits for the training of the other, which is killed; it goes on from the checkpoint
"""

import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.acceptance.harness import (
    STAGES,
    Complaint,
    Running,
    Workplace,
    artifacts,
    check,
    digests,
    forget_steps,
    newest_checkpoint,
    parser,
    show,
)

FROM_TRAINING = STAGES[STAGES.index("train") :]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--scenario", action="append", choices=SCENARIOS)
    given = arguments.parse_args()
    place = Workplace.make(given.folder)
    reference = place.folder / "undisturbed"
    if not reference.is_dir():
        place.finish(reference)
    rows: list[tuple[object, ...]] = []
    status = 0
    for name in given.scenario or SCENARIOS:
        began = time.monotonic()
        try:
            note = SCENARIOS[name](place, reference)
        except Complaint as complaint:
            note, status = f"FAILED: {complaint}", 1
        rows.append((name, f"{time.monotonic() - began:.0f} s", note))
        print(rows[-1], flush=True)
    show("runs at the same time", ("scenario", "took", "what happened"), rows)
    return status


def _at_once(count: int) -> Callable[[Workplace, Path], str]:
    def scenario(place: Workplace, reference: Path) -> str:
        store = _empty(place, f"at-once-{count}")
        return _compare([place.start(store) for _ in range(count)], place, reference, STAGES)

    return scenario


def _late(place: Workplace, reference: Path) -> str:
    store = _before_training(place, reference, "late")
    first = place.start(store)
    check(first.await_stage("train", step=2), f"no training:\n{first.output()}")
    return _compare([first, place.start(store)], place, reference, FROM_TRAINING)


def _takeover(place: Workplace, reference: Path) -> str:
    store = _before_training(place, reference, "takeover")
    runs = [place.start(store), place.start(store)]
    while not (waiting := [run for run in runs if "waiting for train" in run.output()]) or not newest_checkpoint(store):
        check(all(run.process.poll() is None for run in runs), f"a run ended too early:\n{runs[0].output()}")
        time.sleep(0.02)
    second = waiting[0]
    first = runs[1 - runs.index(second)]
    checkpoint = newest_checkpoint(store)
    first.signal(signal.SIGKILL)
    forget_steps(store)
    killed = time.monotonic()
    check(second.await_stage("train", step=1), f"not taken over:\n{second.output()}")
    step = second.trained_steps()[0]
    waited = time.monotonic() - killed
    check(step > checkpoint, f"training began at step {step} although there was a checkpoint of {checkpoint}")
    note = _compare([second], place, reference, FROM_TRAINING)
    return f"killed at checkpoint {checkpoint}; the other's first step {step} was done {waited:.1f} s later; {note}"


SCENARIOS: dict[str, Callable[[Workplace, Path], str]] = {
    "two": _at_once(2),
    "three": _at_once(3),
    "late": _late,
    "takeover": _takeover,
}


def _compare(runs: list[Running], place: Workplace, reference: Path, computed: tuple[str, ...]) -> str:
    """Wait for the runs; each stage of `computed` was computed by exactly one of them, the others by none."""
    for run in runs:
        check(run.wait() == 0, f"a run ended with {run.process.returncode}:\n{run.output()}")
    store = runs[0].store
    by_run = [{stage for stage, how in run.printed().items() if how == "computed"} for run in runs]
    for stage, record in artifacts(store).items():
        makers = [run.process.pid for run, those in zip(runs, by_run, strict=True) if stage in those]
        expected = [record.producer.pid] if stage in computed else []
        check(makers == expected, f"{stage} was computed by {makers or 'nobody'} instead of {expected}")
    check(digests(store) == digests(reference), "other content than a run alone")
    check(not (complaint := place.verify(store)), complaint)
    leftovers = [path.name for name in (".staging", ".work", ".leases") for path in (store / name).glob("*")]
    check(not leftovers, f"left behind: {leftovers}")
    names = [", ".join(sorted(those)) or "nothing" for those in by_run]
    return "; ".join(f"run {number} computed {name}" for number, name in enumerate(names, 1))


def _empty(place: Workplace, name: str) -> Path:
    store = place.folder / name
    shutil.rmtree(store, ignore_errors=True)
    return store


def _before_training(place: Workplace, reference: Path, name: str) -> Path:
    """A store in which everything is that comes before training."""
    store = _empty(place, name)
    for stage in STAGES[: STAGES.index("train")]:
        shutil.copytree(reference / stage, store / stage)
    return store


if __name__ == "__main__":
    sys.exit(main())
