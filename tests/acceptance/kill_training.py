"""`kill -9` of a whole training, launcher and ranks, at random instants, again and again; then to its end.

    python -m tests.acceptance.kill_training --folder /tmp/kills [--kills 10] [--seed 1]

Two data parallel ranks save while they train on. Some kills come while a checkpoint is written, one at the end of an
epoch. Every step of every attempt must have had the tokens of an uninterrupted run; losses, gradient norms, held-out
losses and the final weights must be the same bits. Then a killed training goes on at other layouts, to 1e-5.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import psutil

from mca_lib.checkpoint.digest import weights_digest
from mca_lib.checkpoint.retention import PREFIX, numbered
from mca_lib.trainers.progress import read_log
from tests.acceptance.harness import ROOT, Complaint, check, parser, show
from tests.acceptance.recorded_training import make_model, train_recorded, train_until
from tests.mca_lib.trainers.training import HYPERPARAMETERS, make_store, train
from tests.ranks import RankError, RankPool

EPOCHS, STEPS_PER_EPOCH = 3, 18
WANTED = ("in a save", "any instant", "end of an epoch")
OPTIONS = {
    "num_train_epochs": EPOCHS,
    "save_steps": 3,
    "save_total_limit": 2,
    "async_save": True,
    "eval_strategy": "steps",
    "eval_steps": 4,
}
OTHER_LAYOUTS = {"TP2": {"tensor_model_parallel_size": 2}, "PP2": {"pipeline_model_parallel_size": 2}}
RELATIVE = 1e-5
POLL_SECONDS = 0.002
ATTEMPT_SECONDS = 240.0
MEASURES = ("loss", "grad_norm", "eval_loss")


@dataclass(frozen=True)
class Kill:
    """One kill."""

    wanted: str
    first_step: int
    """Of this attempt."""
    last_step: int
    """That was begun."""
    newest: int
    """Newest checkpoint afterwards; 0 for none."""
    half: bool
    """A checkpoint was being written."""


def samples(out: Path) -> list[tuple[int, str, str]]:
    """(step, rank's file, digest) of every step of every attempt, as it came."""
    found = []
    for path in sorted(out.glob("samples-*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            found.append((record["step"], path.name, record["tokens"]))
    return found


def steps(out: Path) -> list[int]:
    """Of rank 0, as they were begun, over all attempts."""
    return [step for step, name, _ in samples(out) if name == "samples-0.jsonl"]


def start(folder: Path, arguments: Path, number: int) -> subprocess.Popen:
    options = ["--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    rank = ["--local-addr=127.0.0.1", "-m", "tests.acceptance.recorded_training", str(arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mca_lib.launch", *options, *rank]
    with (folder / f"attempt-{number}.log").open("w") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log)


def kill_all(launcher: subprocess.Popen) -> None:
    everyone = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
    for process in everyone:
        process.kill()
    launcher.wait()
    _, alive = psutil.wait_procs(everyone, timeout=10)
    check(not alive, f"processes lived on: {alive}")


def killed(folder: Path, out: Path, arguments: Path, number: int, moments: random.Random) -> Kill:
    """Start an attempt, and kill it a few steps after the newest checkpoint."""
    newest, before = max(numbered(out, PREFIX), default=0), len(steps(out))
    wanted = WANTED[number % len(WANTED)]
    # Far enough that most attempts leave a newer checkpoint, and never as far as the end.
    target = min(newest + moments.randint(4, 8), EPOCHS * STEPS_PER_EPOCH - 4)
    epoch_end = (newest // STEPS_PER_EPOCH + 1) * STEPS_PER_EPOCH
    if wanted == WANTED[2] and epoch_end - newest <= 12 and epoch_end < EPOCHS * STEPS_PER_EPOCH:
        target = epoch_end
    elif wanted == WANTED[2]:
        wanted = WANTED[1]
    launcher, deadline, seen = start(folder, arguments, number), time.monotonic() + ATTEMPT_SECONDS, 0
    while seen < target or (wanted == WANTED[0] and not list(out.glob(".staging-*"))):
        ended = launcher.poll()
        check(ended is None and time.monotonic() < deadline, f"attempt {number} ended with {ended} before its kill")
        time.sleep(POLL_SECONDS)
        seen = max(steps(out)[before:], default=0)
    time.sleep(moments.uniform(0, 0.2))
    kill_all(launcher)
    begun = steps(out)[before:]
    half = bool(list(out.glob(".staging-*")))
    return Kill(wanted, min(begun), max(begun), max(numbered(out, PREFIX), default=0), half)


def figures(out: Path) -> dict[tuple[int, str], float]:
    """What the log says of each step."""
    return {(line["step"], name): line[name] for line in read_log(out) for name in MEASURES if name in line}


def compare(straight: Path, disturbed: Path) -> None:
    """Raise Complaint where the runs differ in one bit."""
    wrong = sorted(set(samples(disturbed)) ^ set(samples(straight)))
    check(not wrong, f"steps with other tokens: {wrong[:4]}")
    one, other = figures(straight), figures(disturbed)
    differing = [key for key in one if other.get(key) != one[key]]
    check(one.keys() == other.keys() and not differing, f"other figures: {differing[:4]}")
    digests = [weights_digest(out / "final" / "model") for out in (straight, disturbed)]
    check(digests[0] == digests[1], "other weights")
    results = [json.loads((out / "train_result.json").read_text()) for out in (straight, disturbed)]
    for name in ("train_loss", "eval_loss", "tokens", "trained_tokens", "steps"):
        check(results[0][name] == results[1][name], f"other {name}")
    print(f"{len(one)} figures of {results[0]['steps']} steps and the weights {digests[0][:16]} are the same bits")


def other_layouts(pool: RankPool, folder: Path) -> None:
    """A killed training goes on at another layout; without dropout, whose random numbers depend on the layout."""
    pool.run_ranks(1, make_model, folder / "no dropout", 0.0)
    places, broken = (f"{folder}/no dropout", f"{folder}/store"), folder / "killed DP2"
    pool.run_ranks(2, train, *places, f"{folder}/straight DP2", OPTIONS)
    try:
        pool.run_ranks(2, train_until, *places, str(broken), OPTIONS, 17)
    except RankError as error:
        check("exit -9" in str(error), str(error))
    rows = []
    for name, layout in OTHER_LAYOUTS.items():
        out, first = folder / f"resumed {name}", max(numbered(broken, PREFIX)) + 1
        shutil.copytree(broken, out)
        pool.run_ranks(2, train, *places, str(out), {**OPTIONS, **layout})
        one, other = figures(folder / "straight DP2"), figures(out)
        keys = [key for key in one if key[0] >= first]
        worst = max(abs(other[key] / one[key] - 1) for key in keys)
        rows.append((name, first, len(keys), f"{worst:.1e}"))
        check(worst < RELATIVE, f"{name}: {worst:.1e} from the run at DP2")
    show("other layouts", ("resumed at", "from step", "figures", "worst relative difference"), rows)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--kills", type=int, default=10)
    given = arguments.parse_args()
    folder = given.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    make_store(folder / "store", rows=70)  # the last step of an epoch has two rows instead of four
    make_store(folder / "store", rows=9, split="eval", seed=9)
    began, kills, pool = time.monotonic(), [], RankPool()
    straight, disturbed = folder / "straight", folder / "disturbed"
    try:
        pool.run_ranks(1, make_model, folder / "model", 0.1)
        places = f"{folder}/model", f"{folder}/store"
        pool.run_ranks(2, train_recorded, *places, str(straight), OPTIONS)
        disturbed.mkdir()
        named = dict(zip(("model_name_or_path", "token_store", "output_dir"), (*places, str(disturbed)), strict=True))
        spec = folder / "arguments.json"
        spec.write_text(json.dumps({**HYPERPARAMETERS, **OPTIONS, **named, "do_eval": True}))
        moments = random.Random(given.seed)
        for number in range(given.kills):
            kills.append(killed(folder, disturbed, spec, number, moments))
            print(kills[-1], flush=True)
        status = start(folder, spec, given.kills).wait()
        check(status == 0, f"the last attempt failed: {folder}/attempt-{given.kills}.log")
        resumes = [kill.first_step - 1 for kill in kills[1:]]
        check(resumes == [kill.newest for kill in kills[:-1]], "an attempt did not go on from the newest checkpoint")
        compare(straight, disturbed)
        other_layouts(pool, folder)
    except Complaint as complaint:
        print(f"FAILED: {complaint}")
        return 1
    finally:
        pool.close()
        heading = ("wanted", "first step", "killed in step", "newest checkpoint", "half a checkpoint")
        show(f"{len(kills)} kills", heading, [astuple(kill) for kill in kills])
    lost = np.mean([kill.last_step - kill.newest for kill in kills])
    print(f"a kill cost {lost:.1f} steps on average; {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
