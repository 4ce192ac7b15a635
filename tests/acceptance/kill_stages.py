"""`kill -9` of the flow process while a stage computes, at random moments, again and again.

    python -m tests.acceptance.kill_stages --folder /tmp/kills [--kills 5] [--seed 1] [--stage train …]

One store lives through all of it: the model comes from a slow hub, each stage is killed `--kills` times, the last run
is left alone. After each kill no half artifact may be visible and no process of the run may be left; training must go
on from its newest checkpoint; in the end every artifact must equal that of a run that nobody disturbed.
"""

import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from tests.acceptance.harness import (
    STAGES,
    Complaint,
    Running,
    Workplace,
    artifacts,
    check,
    digests,
    newest_checkpoint,
    parser,
    show,
)
from tests.tasks.loopback_hub import serve

GONE_SECONDS = 10.0
REPO = "demo/tiny"
MODEL_SECONDS = 12.0
"""How long the hub takes to send the model."""


@dataclass(frozen=True)
class Kill:
    """One kill that hit its stage."""

    stage: str
    after: float
    """Seconds from the lease of the stage to the signal."""
    processes: int
    gone: float
    """Seconds until none of them was left."""
    checkpoint: int
    """Newest checkpoint at that moment."""
    first_step: int | None
    """The first step of this attempt at training, None where it did not come to one."""


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--kills", type=int, default=5)
    arguments.add_argument("--stage", action="append", choices=STAGES)
    given = arguments.parse_args()
    place = Workplace.make(given.folder)
    kills: list[Kill] = []
    try:
        expected = _undisturbed(place)
        with serve() as hub:
            files = {path.name: path.read_bytes() for path in place.model.iterdir()}
            hub.push(REPO, files)
            hub.bytes_per_second = sum(map(len, files.values())) / MODEL_SECONDS
            place = replace(place, fields={"model.name_or_path": REPO}, env={"HF_ENDPOINT": hub.endpoint})
            store = place.folder / "killed"
            shutil.rmtree(store, ignore_errors=True)
            for stage in given.stage or STAGES:
                _kill_often(place, store, stage, given, kills)
            last = place.finish(store)
            _check_resumed(last, kills)
        complaints = [f"{stage}: other content than undisturbed" for stage, digest in digests(store).items()
                      if digest != expected[stage]]  # fmt: skip
        check(not complaints, "; ".join(complaints))
        check(not (complaint := place.verify(store)), complaint)
        leftovers = [path for name in (".staging", ".work", ".leases") for path in (store / name).glob("*")]
        check(not leftovers, f"left behind: {leftovers}")
    except Complaint as complaint:
        print(f"FAILED: {complaint}")
        return 1
    finally:
        heading = ("stage", "killed after", "processes", "gone in", "checkpoint", "first step")
        show(
            f"{len(kills)} kills",
            heading,
            [
                (k.stage, f"{k.after:.1f} s", k.processes, f"{k.gone:.2f} s", k.checkpoint, k.first_step or "")
                for k in kills
            ],
        )
    print(f"longest survivor: {max(kill.gone for kill in kills):.2f} s")
    print(f"all artifacts equal those of an undisturbed run: train {expected['train']}")
    return 0


def _undisturbed(place: Workplace) -> dict[str, str]:
    store = place.folder / "undisturbed"
    place.finish(store)
    return digests(store)


def _kill_often(place: Workplace, store: Path, stage: str, given, kills: list[Kill]) -> None:
    """Kill `given.kills` runs while they compute `stage`."""
    known = artifacts(place.folder / "undisturbed")
    span = MODEL_SECONDS / 3 if stage == "download" else known[stage].producer.seconds
    moments = random.Random(f"{given.seed} {stage}")
    hits = 0
    while hits < given.kills:
        # Finished while another stage's turn was, or before the signal came: to be computed once more.
        shutil.rmtree(store / stage, ignore_errors=True)
        run = place.start(store)
        before = kills[-1] if kills and kills[-1].stage == stage == "train" else None
        check(run.await_stage(stage), f"{stage} was not reached:\n{run.output()}")
        began, delay = time.monotonic(), moments.uniform(0, span)
        while time.monotonic() - began < delay and run.computes(stage):
            time.sleep(0.02)
        hit = run.computes(stage)
        if not hit:
            span *= 0.8
        steps = run.trained_steps()[0] if stage == "train" and hit else 0
        family = run.family()
        after = time.monotonic() - began
        run.signal(signal.SIGKILL)
        gone = run.seconds_until_gone()
        check(gone <= GONE_SECONDS, f"{stage}: processes lived on for {gone:.1f} s")
        check(not (complaint := place.verify(store)), f"{stage}: {complaint}")
        if before and before.checkpoint and steps:
            check(steps == before.checkpoint + 1, f"training began at step {steps}, checkpoint {before.checkpoint}")
        if hit and not (store / stage).is_dir():
            kills.append(Kill(stage, after, len(family), gone, newest_checkpoint(store), steps or None))
            hits += 1
            print(kills[-1], flush=True)


def _check_resumed(run: Running, kills: list[Kill]) -> None:
    trained = [kill for kill in kills if kill.stage == "train"]
    if trained:
        check(run.printed()["export"] == "computed", "export was not computed in the last run")
        check(any((kill.first_step or 1) > 1 for kill in trained), "no killed attempt had resumed; take another seed")


if __name__ == "__main__":
    sys.exit(main())
