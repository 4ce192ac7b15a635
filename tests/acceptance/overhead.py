"""What the pipeline costs beside the work: of a whole run, and of one for which everything is there.

    python -m tests.acceptance.overhead --folder /tmp/overhead [--runs 3] [--repeats 9]
        [--dvc /venv/bin/dvc] [--snakemake /venv/bin/snakemake]

A whole run of the demonstration, with a server that is up and without one: its wall time, and the share of it in which
no child process of a stage lives (the job or torchrun; Prefect's server is none). At most 5 %. Then `mcaflow run` once
more, without a server and with nothing to do, in turns with `dvc repro` and `snakemake` on a pipeline of the same
stages, files and sizes: faster than both.
"""

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import yaml

from flows.graph import nodes_of
from flows.recipe import load_recipe
from tests.acceptance.harness import ROOT, Complaint, Workplace, artifacts, check, launch, parser, show
from tests.acceptance.service import Service

LOOK_SECONDS = 0.01
GOAL = 0.05
RECIPE = ROOT / "deployments" / "recipes" / "demo.yaml"


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=3, help="whole runs")
    arguments.add_argument("--repeats", type=int, default=9, help="runs with nothing to do, of each program")
    arguments.add_argument("--dvc", type=Path, help="a program of another environment")
    arguments.add_argument("--snakemake", type=Path, help="likewise")
    given = arguments.parse_args()
    place = Workplace.make(given.folder)
    try:
        with Service(place, "service").running("--gpus", "0") as service:
            served = _computed(place, given.runs, "with a server", {"PREFECT_API_URL": service.url})
        share = max(served, _computed(place, given.runs, "without a server", {}))
        others = {name: path for name in ("dvc", "snakemake") if (path := getattr(given, name)) is not None}
        medians = _nothing_to_do(place, others, given.repeats)
    except Complaint as complaint:
        print(f"WRONG: {complaint}")
        return 1
    slower = [name for name, seconds in medians.items() if seconds < medians["mcaflow"]]
    print(f"faster than mcaflow: {', '.join(slower) or 'none'}")
    return 1 if slower or share > GOAL else 0


def _computed(place: Workplace, runs: int, how: str, server: Mapping[str, str]) -> float:
    """Median share of whole runs beside their child processes."""
    whole = [_whole(place, server) for _ in range(runs)]
    heading = ("run", "wall", "in child processes", "beside", "share", "before the first", "after the last")
    show(f"the demonstration, computed, {how}", heading, [run.row(n) for n, run in enumerate(whole, 1)])
    share = statistics.median(run.share for run in whole)
    print(f"median share beside child processes, {how}: {share:.1%}, goal {GOAL:.0%}")
    return share


@dataclass(frozen=True)
class Whole:
    """A run that computed everything."""

    wall: float
    busy: float
    before: float
    """Seconds until the first child."""
    after: float
    """Seconds after the last one."""

    @property
    def share(self) -> float:
        return 1 - self.busy / self.wall

    def row(self, number: int) -> tuple[object, ...]:
        seconds = (f"{value:.1f} s" for value in (self.wall, self.busy, self.wall - self.busy))
        return number, *seconds, f"{self.share:.1%}", f"{self.before:.1f} s", f"{self.after:.1f} s"


def _whole(place: Workplace, server: Mapping[str, str]) -> Whole:
    store = _store(place)
    shutil.rmtree(store, ignore_errors=True)
    began = time.monotonic()
    run = launch(RECIPE, store, place.folder / "whole.log", _environment(place) | server, *_flags(place))
    known: dict[str, bool] = {}
    seen: list[tuple[float, bool]] = []
    """(when, whether a child lived) of each look."""
    while run.process.poll() is None:
        seen.append((time.monotonic(), _has_job(run.process.pid, known)))
        time.sleep(LOOK_SECONDS)
    wall = time.monotonic() - began
    check(run.process.returncode == 0, run.output())
    lived = [when for when, has in seen if has]
    check(bool(lived), "no child process was seen")
    busy = sum(later - when for (when, has), (later, _) in pairwise(seen) if has)
    return Whole(wall, busy, lived[0] - began, began + wall - lived[-1])


def _has_job(pid: int, known: dict[str, bool]) -> bool:
    """Whether a child of a stage lives; `known` remembers which children are some."""
    try:
        children = [c for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
    except OSError:
        return False
    for child in children:
        if child not in known:
            try:
                line = Path(f"/proc/{child}/cmdline").read_bytes()
            except OSError:
                continue
            if b"guardian.py" not in line:
                continue  # not yet what it becomes
            known[child] = b"prefect" not in line
    return any(known.get(child, False) for child in children)


def _nothing_to_do(place: Workplace, others: Mapping[str, Path], repeats: int) -> dict[str, float]:
    """Program -> median of its seconds."""
    store = _store(place)
    programs: dict[str, Callable[[], None]] = {"mcaflow": lambda: _run_again(place, store)}
    for name, program in others.items():
        programs[name] = {"dvc": _dvc, "snakemake": _snakemake}[name](place, store, program)
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, call in programs.items():
            began = time.monotonic()
            call()
            taken[name].append(time.monotonic() - began)
    rows = [(n, f"{statistics.median(t):.2f} s", f"{min(t):.2f} s", f"{max(t):.2f} s") for n, t in taken.items()]
    show(f"nothing to do, {repeats} times in turns", ("program", "median", "least", "most"), rows)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _run_again(place: Workplace, store: Path) -> None:
    run = launch(RECIPE, store, place.folder / "again.log", _environment(place), *_flags(place))
    check(run.wait() == 0 and set(run.printed().values()) == {"cached"}, run.output())


def _dvc(place: Workplace, store: Path, program: Path) -> Callable[[], None]:
    """The same stages for dvc: each copies what mcaflow has made."""
    folder = _fresh(place.folder / "dvc")
    stages = {
        name: {"cmd": _copy(source, name), "deps": deps, "outs": [f"out/{name}"]}
        for name, source, deps in _stages(place, store)
    }
    (folder / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}, sort_keys=False))
    _call(folder, program, "init", "--no-scm", "--quiet")
    _call(folder, program, "config", "core.analytics", "false")
    _call(folder, program, "config", "core.check_update", "false")
    _call(folder, program, "repro")

    def again() -> None:
        check("up to date" in _call(folder, program, "repro"), "dvc has something to do")

    return again


def _snakemake(place: Workplace, store: Path, program: Path) -> Callable[[], None]:
    """The same stages for snakemake."""
    folder = _fresh(place.folder / "snakemake")
    stages = list(_stages(place, store))
    rules = [f"rule all:\n    input: {[f'out/{name}' for name, _, _ in stages]}\n"]
    rules += [
        f"rule {name}:\n    input: {deps}\n    output: directory('out/{name}')\n    shell: '{_copy(source, name)}'\n"
        for name, source, deps in stages
    ]
    (folder / "Snakefile").write_text("\n".join(rules))
    _call(folder, program, "--cores", "2")

    def again() -> None:
        check("Nothing to be done" in _call(folder, program, "--cores", "2"), "snakemake has something to do")

    return again


def _stages(place: Workplace, store: Path) -> list[tuple[str, Path, list[str]]]:
    """(stage, folder of its artifact, what it depends on) of each; the model and the data are copied beside."""
    source = {"download": [str(place.model)], "dataset": [str(place.data)]}
    config = load_recipe(RECIPE)
    found = []
    for name, record in sorted(artifacts(store).items(), key=lambda item: list(nodes_of(config)).index(item[0])):
        artifact = Path(record.external) if record.external else store / name / record.key
        found.append((name, artifact, [*source.get(name, []), *(f"out/{n}" for n in nodes_of(config)[name].after)]))
    return found


def _copy(source: Path, name: str) -> str:
    return f"mkdir -p out && cp -rL {source} out/{name} && chmod -R u+w out/{name}"


def _call(folder: Path, program: Path, *arguments: str) -> str:
    done = subprocess.run([program.absolute(), *arguments], cwd=folder, capture_output=True, text=True)
    check(done.returncode == 0, f"{program.name} {' '.join(arguments)}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _store(place: Workplace) -> Path:
    return place.folder / "store"


def _flags(place: Workplace) -> list[str]:
    return ["--set", f"model.name_or_path={place.model}", "--set", f"dataset.files=[{place.data}]"]


def _environment(place: Workplace) -> dict[str, str]:
    """Without a server."""
    return {name: value for name, value in place.environment().items() if name != "PREFECT_API_URL"}


if __name__ == "__main__":
    sys.exit(main())
