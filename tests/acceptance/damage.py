"""One flipped bit, a truncated file, a deleted file: in every file of every artifact, records included.

    python -m tests.acceptance.damage --folder /tmp/damage [--seed 1] [--stage train …]

Every kind of damage to every file must be found and named by the look at an artifact that precedes each use. Then runs:
for each stage and each kind, a run of the recipe must name the damaged file, move the artifact to quarantine, compute
that stage and take all others from the store.
"""

import os
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tasks.record import RECORD_NAME
from tasks.store import Artifact, ArtifactStore
from tasks.verify import Damage
from tests.acceptance.harness import STAGES, Complaint, Workplace, artifacts, check, digests, parser, show
from tests.tasks.loopback_hub import serve

REPO = "demo/tiny"


def _flip(path: Path, moments: random.Random) -> None:
    """Flip one bit, and give the file its old time stamp back."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(offset := moments.randrange(stat.st_size))
        byte = file.read(1)[0] ^ (1 << moments.randrange(8))
        file.seek(offset)
        file.write(bytes([byte]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _truncate(path: Path, moments: random.Random) -> None:
    os.truncate(path, moments.randrange(path.stat().st_size))


def _delete(path: Path, moments: random.Random) -> None:
    path.unlink()


KINDS: dict[str, Callable[[Path, random.Random], None]] = {"flip": _flip, "truncate": _truncate, "delete": _delete}


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--stage", action="append", choices=STAGES)
    given = arguments.parse_args()
    place = Workplace.make(given.folder)
    moments = random.Random(given.seed)
    stages = given.stage or STAGES
    rows: list[tuple[object, ...]] = []
    with serve() as hub:
        # From a hub, so that the model too is in the store.
        hub.push(REPO, {path.name: path.read_bytes() for path in place.model.iterdir()})
        place = replace(place, fields={"model.name_or_path": REPO}, env={"HF_ENDPOINT": hub.endpoint})
        store = place.folder / "damaged"
        shutil.rmtree(store, ignore_errors=True)
        place.finish(store)
        expected = digests(store)
        try:
            show(
                "found and named", ("stage", "files", *KINDS), [_look_at_all(store, stage, moments) for stage in stages]
            )
            for stage in stages:
                for kind, name in _one_of_each(store, stage, moments):
                    rows.append(_run_again(place, store, stage, kind, name, moments))
                    print(rows[-1], flush=True)
            check(digests(store) == expected, "other content than before")
            check(not (complaint := place.verify(store)), complaint)
        except Complaint as complaint:
            print(f"FAILED: {complaint}")
            return 1
        finally:
            show("mended by a run", ("stage", "damage", "file", "computed", "cached", "seconds"), rows)
    return 0


def _files(store: Path, stage: str) -> tuple[Path, list[str]]:
    """The folder of the stage's artifact and the names of all its files, the record among them."""
    home = ArtifactStore(store).location(stage, artifacts(store)[stage].key)
    return home, sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


def _look_at_all(store: Path, stage: str, moments: random.Random) -> tuple[object, ...]:
    """Damage each file in each way, look, and mend it."""
    home, names = _files(store, stage)
    opened = ArtifactStore(store)
    found = dict.fromkeys(KINDS, 0)
    for name in names:
        path = home / name
        content, mode = path.read_bytes(), path.stat().st_mode
        for kind, harm in KINDS.items():
            if not content and kind != "delete":
                continue
            os.chmod(path, 0o644)
            harm(path, moments)
            answer = opened.inspect(stage, home.name)
            check(isinstance(answer, Damage) and answer.file == name, f"{stage}/{name}, {kind}: {answer}")
            found[kind] += 1
            path.unlink(missing_ok=True)
            path.write_bytes(content)
            os.chmod(path, mode)
            check(isinstance(opened.inspect(stage, home.name), Artifact), f"{stage}/{name} was mended")
    return stage, len(names), *found.values()


def _one_of_each(store: Path, stage: str, moments: random.Random) -> list[tuple[str, str]]:
    """(kind, file) of the runs: each kind once in a payload file, and a bit in the record."""
    home, names = _files(store, stage)
    payload = [name for name in names if name != RECORD_NAME and (home / name).stat().st_size]
    return [(kind, moments.choice(payload)) for kind in KINDS] + [("flip", RECORD_NAME)]


def _run_again(
    place: Workplace, store: Path, stage: str, kind: str, name: str, moments: random.Random
) -> tuple[object, ...]:
    home, _ = _files(store, stage)
    kept = set((store / ".quarantine").glob("*"))
    os.chmod(home / name, 0o644)
    KINDS[kind](home / name, moments)
    run = place.finish(store)
    printed = run.printed()
    computed = [each for each, how in printed.items() if how == "computed"]
    check(computed == [stage], f"{stage}/{name}, {kind}: computed {computed}")
    check(len(printed) == len(STAGES), f"not all stages are in the table:\n{run.output()}")
    check(f"{stage}/{home.name}/{name}" in run.output(), f"the output does not name {stage}/{name}:\n{run.output()}")
    moved = [path for path in set((store / ".quarantine").glob("*")) - kept if path.is_dir()]
    check([path.name.partition("-")[0] for path in moved] == [stage], f"in quarantine: {moved}")
    seconds = artifacts(store)[stage].producer.seconds
    return stage, kind, name, ", ".join(computed), len(printed) - 1, f"{seconds:.1f}"


if __name__ == "__main__":
    sys.exit(main())
