"""Two runs that promote one model, with a gate, while somebody rolls back and garbage is collected all the time.

    python -m tests.acceptance.gate_race --folder /tmp/race [--rounds 3] [--case remote]

Two `mcaflow run` with different seeds on one store are started at once, again and again; the gate asks for a lower
held-out loss than production's, so the later one is compared with what the earlier one has promoted. Meanwhile a loop
collects everything that may go (no run is kept that has ended, nothing is young), and another rolls back what it can.
All runs must end well. The history must be whole and in order: one entry per promotion that a run has announced and per
rollback, no holder twice in a row, the link and `models` as its last line. Then the same with a remote store, which a
second machine, with an empty local store, must find to hold everything: it computes nothing. About 10 minutes.
"""

import itertools
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.aliases import Aliases, Promotion
from tasks.collect import Policy, collect
from tasks.errors import StoreError
from tasks.store import ArtifactStore
from tests.acceptance.harness import STAGES, Complaint, Running, Workplace, check, parser, show

MODEL = "raced"
EVERYTHING = Policy(runs=0, promotions=1, young_seconds=0.0)
"""What is kept are the present holder, and what a run that goes on has asked for."""
GATED = {"promote.model": MODEL, "promote.gate": ["heldout_loss < production - 0.0001"], "training.max_steps": 6}


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=3)
    scenarios = {"local": _local, "remote": _remote}
    arguments.add_argument("--case", action="append", choices=scenarios)
    given = arguments.parse_args()
    place = Workplace.make(given.folder)
    rows: list[tuple[object, ...]] = []
    wrong = 0
    for name in given.case or scenarios:
        try:
            rows.append((name, scenarios[name](place, given.rounds, given.seed)))
        except Complaint as complaint:
            rows.append((name, f"WRONG: {complaint}"))
            wrong += 1
        print(*rows[-1], sep=" | ", flush=True)
    show("promotion under two runs at once", ("store", "what happened"), rows)
    print(f"{wrong} wrong")
    return 1 if wrong else 0


def _local(place: Workplace, rounds: int, seed: int) -> str:
    return _race(place, _empty(place, "store"), rounds, seed)


def _remote(place: Workplace, rounds: int, seed: int) -> str:
    """What the first machine loses to the collection, it fetches again; the second machine computes nothing."""
    remote = _empty(place, "bucket")
    remote.mkdir()
    url = f"store.remote=file://{remote}"
    note = _race(place, _empty(place, "first"), 1, seed, "--set", url)
    seeds = ("--set", f"training.seed={seed}", "--set", f"store.remote=file://{remote}")
    second = _start(place, _empty(place, "second"), *seeds)
    check(second.wait() == 0, second.output())
    computed = [stage for stage, how in second.printed().items() if how == "computed"]
    check(set(computed) <= {"download"}, f"the second machine has computed {computed}")
    check(set(second.printed()) == set(STAGES), second.output())
    return f"{note}; a second machine computed {', '.join(computed) or 'nothing'} (a local model is looked at in place)"


def _race(place: Workplace, store: Path, rounds: int, seed: int, *flags: str) -> str:
    runs: list[Running] = []
    with _again_and_again(lambda: _collect(store)) as collections, _again_and_again(lambda: _roll_back(store)) as back:
        for number in range(rounds):
            pair = [_start(place, store, "--set", f"training.seed={seed + 2 * number + i}", *flags) for i in range(2)]
            runs += pair
            for run in pair:
                check(run.wait() == 0, f"a run ended with {run.process.returncode}:\n{run.output()}")
    announced = [key for run in runs for key in re.findall(rf"^{MODEL}/production is export/(\w+)", run.output(), re.M)]
    refused = sum(f"{MODEL}/production not promoted" in run.output() for run in runs)
    check(len(announced) + refused == len(runs), f"{len(announced)} promoted and {refused} refused of {len(runs)} runs")
    history = Aliases(ArtifactStore(store)).history(MODEL)
    _check_history(history, announced, sum(back))
    link = store / ".models" / MODEL / "production"
    check(link.resolve() == (store / "export" / history[-1].key).resolve(), "the link is not at the last holder")
    check((link / "config.json").is_file(), "the model in production is not there")
    check(not (complaint := place.verify(store)), complaint)
    return (
        f"{len(runs)} runs, {len(announced)} promoted, {refused} refused by the gate, {sum(back)} rolled back; "
        f"{len(history)} entries; {sum(collections)} things collected in {len(collections)} collections"
    )


def _check_history(history: list[Promotion], announced: list[str], rollbacks: int) -> None:
    forward = [promotion.key[:12] for promotion in history if not promotion.rollback]
    # A run whose model holds the name already announces it, and adds nothing.
    check(set(forward) == set(announced), f"the history has {forward}, the runs announced {announced}")
    check(len(history) - len(forward) == rollbacks, f"{len(history) - len(forward)} rollbacks, not {rollbacks}")
    check([p.time for p in history] == sorted(p.time for p in history), "the history is not in order of time")
    keys = [promotion.key for promotion in history]
    check(all(a != b for a, b in itertools.pairwise(keys)), "a holder stands twice in a row")


def _start(place: Workplace, store: Path, *flags: str) -> Running:
    gate = [part for name, value in GATED.items() for part in ("--set", f"{name}={value}")]
    return place.start(store, *gate, *flags)


def _collect(store: Path) -> int:
    if not store.exists():
        return 0
    return len(collect(ArtifactStore(store), EVERYTHING).items)


def _roll_back(store: Path) -> int:
    if not store.exists():
        return 0
    try:
        Aliases(ArtifactStore(store)).rollback(MODEL, run="gate_race")
    except StoreError:
        return 0  # nothing to go back to, or it has been collected
    return 1


@contextmanager
def _again_and_again(call: Callable[[], int]) -> Iterator[list[int]]:
    """Call it in a thread until the block ends; what it returned."""
    ended, returned, errors = threading.Event(), [], []

    def loop() -> None:
        try:
            while not ended.wait(0.3):
                returned.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield returned
    finally:
        ended.set()
        thread.join()
    check(not errors, f"beside the runs: {errors}")


def _empty(place: Workplace, name: str) -> Path:
    folder = place.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
