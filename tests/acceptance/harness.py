"""What the acceptance scripts of this folder share: `mcaflow run` as a process, its stages seen from outside.

Every process of a run inherits the variable MARK, so that none can hide, whatever session or group it moved to.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from tasks.record import ArtifactRecord
from tasks.store import ArtifactStore

ROOT = Path(__file__).parents[2]
STAGES = ("download", "dataset", "convert", "train", "export", "evaluate")
MARK = "MCAFLOW_ACCEPTANCE"
POLL_SECONDS = 0.05
RUN_SECONDS = 900.0
"""No run of the shortened recipe may take longer."""

# The demonstration, shortened: 24 steps with a checkpoint every 3, and a small evaluation.
SHORTENED = {
    "training.max_steps": 24,
    "training.save_steps": 3,
    "eval.num_samples": 1,
    "eval.max_new_tokens": 4,
    "eval.max_rows": 16,
}


@dataclass(frozen=True)
class Workplace:
    """A folder with the demonstration's model and data, a Prefect home of its own, and stores."""

    folder: Path
    fields: dict[str, object] = field(default_factory=dict)
    """Fields of the recipe beside `SHORTENED`."""
    env: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def make(folder: Path) -> "Workplace":
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        place = Workplace(folder)
        if not place.model.is_dir():
            command = [sys.executable, "-m", "mca_lib.demo_assets", str(folder / "demo")]
            subprocess.run(command, check=True, env=place.environment(), stdout=subprocess.DEVNULL)
        return place

    @property
    def model(self) -> Path:
        return self.folder / "demo" / "model"

    @property
    def data(self) -> Path:
        return self.folder / "demo" / "data.json"

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        own = {"PYTHONPATH": str(ROOT), "PREFECT_HOME": str(self.folder / "prefect"), "COLUMNS": "200"}
        return kept | own | self.env

    def start(self, store: Path, *flags: str) -> "Running":
        """`mcaflow run` on a store."""
        fields = {"model.name_or_path": str(self.model), "dataset.files": [str(self.data)]} | SHORTENED | self.fields
        settings = [part for name, value in fields.items() for part in ("--set", f"{name}={json.dumps(value)}")]
        recipe = ROOT / "deployments" / "recipes" / "demo.yaml"
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        log = logs / f"{store.name}-{len(list(logs.iterdir())):03}.log"
        return launch(recipe, store, log, self.environment(), *settings, *flags)

    def finish(self, store: Path, *flags: str) -> "Running":
        """A whole run; it must succeed."""
        run = self.start(store, *flags)
        check(run.wait() == 0, f"run ended with {run.process.returncode}:\n{run.output()}")
        return run

    def verify(self, store: Path) -> str:
        """Complaints of `mcaflow verify --full`, "" when there is none or nothing to verify yet."""
        if not store.exists():
            return ""
        argv = [*_MCAFLOW, "verify", "--full", "--store", str(store)]
        done = subprocess.run(argv, env=self.environment(), capture_output=True, text=True)
        return "" if done.returncode == 0 else done.stdout + done.stderr


@dataclass(frozen=True)
class Running:
    """A run that was started."""

    process: subprocess.Popen
    store: Path
    mark: str
    log: Path

    def wait(self, timeout: float = RUN_SECONDS) -> int:
        return self.process.wait(timeout)

    def output(self) -> str:
        """What this run has printed so far."""
        return self.log.read_text(errors="replace")

    def printed(self) -> dict[str, str]:
        """Stage -> `computed` or `cached`, by the table at the end."""
        rows = re.findall(r"^(\w+) +(computed|cached) +[\d.]+ ", self.output(), re.MULTILINE)
        return dict(rows)

    def computes(self, stage: str) -> bool:
        """Whether this run holds the lease of the stage."""
        for lease in _glob(self.store / ".leases", f"{stage}-*"):
            try:
                if json.loads(lease.read_bytes())["pid"] == self.process.pid:
                    return True
            except (OSError, ValueError):
                continue  # released just now
        return False

    def await_stage(self, stage: str, *, step: int = 0) -> bool:
        """Wait until the run computes the stage, and has trained `step` steps of it; False if it ends before."""
        while self.process.poll() is None:
            if self.computes(stage) and self.trained_steps()[-1] >= step:
                return True
            time.sleep(POLL_SECONDS)
        return False

    def trained_steps(self) -> list[int]:
        """Steps that this attempt of `train` has reported; [0] before the first. See `forget_steps`."""
        for path in _glob(self.store / ".work", "train-*/logs/train.progress"):
            lines = path.read_text().splitlines() if path.exists() else []
            steps = [json.loads(line).get("step") for line in lines if line.endswith("}")]
            return [step for step in steps if step is not None] or [0]
        return [0]

    def family(self) -> list[psutil.Process]:
        """Every living process of this run, itself included."""
        return [process for process in psutil.process_iter() if _mark(process) == self.mark]

    def signal(self, number: signal.Signals) -> float:
        """Send a signal to the flow process alone and wait for its end; the seconds that took."""
        began = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(RUN_SECONDS)
        return time.monotonic() - began

    def seconds_until_gone(self, limit: float = 60.0) -> float:
        """Seconds until no process of the run is left; complains about those that stay."""
        began = time.monotonic()
        while left := self.family():
            if time.monotonic() - began > limit:
                names = [" ".join(process.cmdline())[:150] for process in left]
                for process in left:
                    process.kill()
                raise Complaint(f"still there after {limit:.0f} s: {names}")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - began


def launch(recipe: Path, store: Path, log: Path, env: dict[str, str], *flags: str) -> Running:
    """Start `mcaflow run` in a process group of its own; its output goes to `log`."""
    mark = uuid.uuid4().hex
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [*_MCAFLOW, "run", str(recipe), "--store", str(store), *flags],
            env=env | {MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
        )
    return Running(process, store, mark, log)


class Complaint(Exception):
    """Something that must hold does not."""


def check(condition: bool, complaint: str) -> None:
    if not condition:
        raise Complaint(complaint)


def artifacts(store: Path) -> dict[str, ArtifactRecord]:
    """Stage -> its newest record."""
    return {artifact.stage: artifact.record for artifact in ArtifactStore(store).ls()}


def digests(store: Path) -> dict[str, str]:
    """Stage -> content digest of its newest artifact."""
    return {stage: record.digest for stage, record in artifacts(store).items()}


def newest_checkpoint(store: Path) -> int:
    """Step of the newest checkpoint in the work folder of `train`, 0 without one."""
    names = [path.name for path in _glob(store / ".work", "train-*/checkpoint-*")]
    return max((int(name.partition("-")[2]) for name in names), default=0)


def forget_steps(store: Path) -> None:
    """Remove the report of a dead attempt at `train`, so that it is not taken for that of the next one."""
    for path in _glob(store / ".work", "train-*/logs/train.progress"):
        path.unlink(missing_ok=True)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Arguments of every script here."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--folder", type=Path, required=True, help="gets model, data, logs and stores")
    made.add_argument("--seed", type=int, default=1)
    return made


def show(title: str, heading: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    """Print a table; its last column may be long."""
    table = Table(*heading, title=title, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=180).print(table)


_MCAFLOW = (sys.executable, "-m", "flows.cli")


def _mark(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK) if process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None  # gone meanwhile, or another user's


def _glob(folder: Path, pattern: str) -> Iterator[Path]:
    return folder.glob(pattern) if folder.is_dir() else iter(())
