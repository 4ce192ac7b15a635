"""`kill -9` of the flow process while a stage computes, at random moments, again and again.

    python -m tests.acceptance.kill_stages --folder /tmp/kills [--kills 5] [--seed 1] [--stage train …]

One store lives through all of it: the model comes from a slow hub, each stage is killed `--kills` times, the last run
is left alone. After each kill no half artifact may be visible and no process of the run may be left; training must go
on from its newest checkpoint; in the end every artifact must equal that of a run that nobody disturbed.
"""

import random
import re
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
    forget_steps,
    newest_checkpoint,
    parser,
    show,
)
from tests.tasks.loopback_hub import serve

GONE_SECONDS = 10.0
REPO = "demo/tiny"
MODEL_SECONDS = 12.0
"""How long the hub takes to send the model."""
WITHIN_STEPS = 0.7
"""Share of the kills of `train` that come a few steps after its newest checkpoint: most of its time is start-up."""


@dataclass(frozen=True)
class Kill:
    """One kill that hit its stage."""

    stages: tuple[str, ...]
    """Computing at that moment; two where they run side by side."""
    after: float
    """Seconds from the lease of the stage to the signal."""
    processes: int
    gone: float
    """Seconds until none of them was left."""
    checkpoint: int
    """Newest checkpoint at that moment."""
    first_step: int | None
    """The first step of this attempt at training, None where it did not come to one."""

    def row(self) -> tuple[object, ...]:
        stages = ", ".join(self.stages)
        return stages, f"{self.after:.1f} s", self.processes, f"{self.gone:.2f} s", self.checkpoint, self.first_step


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--kills", type=int, default=5)
    arguments.add_argument("--stage", action="append", choices=STAGES)
    arguments.add_argument("--go-on", action="store_true", help="on the store that an earlier call has left")
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
            if not given.go_on:
                shutil.rmtree(store, ignore_errors=True)
            for stage in given.stage or STAGES:
                _kill_often(place, store, stage, given, kills)
            checkpoint = _to_resume(store)
            forget_steps(store)
            last = place.finish(store)
            if checkpoint:
                _check_resumed(last, checkpoint)
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
        heading = ("stages", "killed after", "processes", "gone in", "checkpoint", "first step")
        show(f"{len(kills)} kills", heading, [kill.row() for kill in kills])
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
    while sum(stage in kill.stages for kill in kills) < given.kills:
        # Finished while another stage's turn was, or before the signal came: to be computed once more.
        shutil.rmtree(store / stage, ignore_errors=True)
        checkpoint = _to_resume(store)
        forget_steps(store)
        run = place.start(store)
        check(run.await_stage(stage), f"{stage} was not reached:\n{run.output()}")
        began, delay = time.monotonic(), moments.uniform(0, span)
        if stage == "train" and moments.random() < WITHIN_STEPS:
            run.await_stage(stage, step=checkpoint + moments.randint(1, 6))
            delay = time.monotonic() - began + moments.uniform(0, 1)
        while time.monotonic() - began < delay and run.computes(stage):
            time.sleep(0.02)
        hit = tuple(each for each in STAGES if run.computes(each))
        if stage not in hit:
            span *= 0.9
        steps = run.trained_steps()[0] if "train" in hit else 0
        family = run.family()
        after = time.monotonic() - began
        run.signal(signal.SIGKILL)
        gone = run.seconds_until_gone()
        check(gone <= GONE_SECONDS, f"{stage}: processes lived on for {gone:.1f} s")
        check(not (complaint := place.verify(store)), f"{stage}: {complaint}")
        if checkpoint and (steps or stage not in ("dataset", "convert", "train")):
            _check_resumed(run, checkpoint)
        if hit := tuple(each for each in hit if not (store / each).is_dir()):
            kills.append(Kill(hit, after, len(family), gone, newest_checkpoint(store), steps or None))
            print(kills[-1], flush=True)


def _to_resume(store: Path) -> int:
    """Step of the checkpoint that training has to go on from; 0 without one, and where it was at its end."""
    return 0 if list(store.glob(".work/train-*/train_result.json")) else newest_checkpoint(store)


def _check_resumed(run: Running, checkpoint: int) -> None:
    """The run has gone on from the checkpoint that there was."""
    found = re.search(r"resuming from \S*checkpoint-(\d+)", run.output())
    steps = run.trained_steps()[0], int(found[1]) + 1 if found else 0  # a killed run may not have said so yet
    check(checkpoint + 1 in steps, f"training began at step {max(steps)}, checkpoint {checkpoint}:\n{run.output()}")


if __name__ == "__main__":
    sys.exit(main())
