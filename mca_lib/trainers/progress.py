"""What a run says about itself while it goes: progress lines for the parent process, and a log that survives resuming.

`$MCAFLOW_PROGRESS`     JSON lines for whoever watches; may repeat steps after a resume
`training_log.jsonl`    one line per logged step, each step once, whatever was interrupted
"""

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mca_lib.checkpoint.sealed import naming
from mca_lib.trainers.engine import StepMetrics
from mca_lib.trainers.names import LOG_NAME

CURVE_POINTS = 100


@dataclass
class Totals:
    """Counters of the whole run, saved with each checkpoint."""

    loss_sum: float = 0.0
    count: int = 0
    """What the losses were divided by: tokens with loss, or pairs."""
    loss_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Spent in steps, over all attempts."""
    window_sums: dict[str, float] = field(default_factory=dict)
    window_count: int = 0
    callbacks: dict[str, Any] = field(default_factory=dict)
    """What transformers' callbacks remember; see `Callbacks.to_save`."""

    def add(self, metrics: StepMetrics, seconds: float) -> None:
        self.loss_sum += metrics.sums["loss"]
        self.count += metrics.count
        self.loss_tokens += metrics.loss_tokens
        self.tokens += metrics.tokens
        self.seconds += seconds
        self.window_sums = {name: self.window_sums.get(name, 0.0) + value for name, value in metrics.sums.items()}
        self.window_count += metrics.count

    def window_means(self) -> dict[str, float]:
        """`loss` and the measures since the last call, per token or per pair; nan when nothing was counted."""
        means = {
            n: total / self.window_count if self.window_count else math.nan for n, total in self.window_sums.items()
        }
        self.window_sums, self.window_count = {}, 0
        return means

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Meter:
    """How fast steps go: what was measured since the last line, by the clock of this rank.

    Args:
        step: steps that were made before.
        total: steps of the run.
        devices: that work at it.
        peak_flops: floating point operations per second of all of them together; see `peak`.
    """

    def __init__(self, step: int, total: int, devices: int, peak_flops: float) -> None:
        self._first_step, self._total, self._devices, self._peak = step, total, devices, peak_flops
        self._began = time.monotonic()
        self._reset()

    def _reset(self) -> None:
        self._steps = self._tokens = self._flops = 0
        self._seconds = self._waited = 0.0

    def add(self, seconds: float, waited: float, tokens: int, flops: int) -> None:
        """A step that took `seconds`, of which this rank made its batch for `waited`."""
        self._steps += 1
        self._seconds += seconds
        self._waited += waited
        self._tokens += tokens
        self._flops += flops

    def read(self, step: int) -> dict[str, float]:
        """Also starts the next interval. Evaluations and checkpoints count for the time that is left alone."""
        seconds = max(self._seconds, 1e-9)
        per_step = (time.monotonic() - self._began) / max(step - self._first_step, 1)
        measures = {
            "tokens_per_second": round(self._tokens / seconds, 1),
            "tokens_per_second_per_device": round(self._tokens / seconds / self._devices, 1),
            "mfu": round(self._flops / seconds / self._peak, 4),
            "step_seconds": round(self._seconds / max(self._steps, 1), 4),
            "data_wait": round(self._waited / seconds, 4),
            "eta_seconds": round(per_step * (self._total - step), 1),
        }
        self._reset()
        return measures


class TrainingLog:
    """Writes both files; rank 0 only.

    Args:
        output_dir: of the log.
        resumed_step: of the checkpoint that the run goes on from; lines of later steps go.
        is_over: it was the last step, whose evaluation is made again.
    """

    def __init__(self, output_dir: Path, resumed_step: int, *, is_over: bool) -> None:
        self._path = output_dir / LOG_NAME
        self._progress = os.environ.get("MCAFLOW_PROGRESS")
        keep = [line for line in read_log(output_dir) if line["step"] <= resumed_step]
        if is_over:
            keep = [line for line in keep if line["step"] < resumed_step or "eval_loss" not in line]
        temporary = self._path.with_suffix(".tmp")
        with naming(temporary):
            temporary.write_text("".join(json.dumps(line) + "\n" for line in keep))
        os.replace(temporary, self._path)

    def write(self, record: dict[str, Any]) -> None:
        """One line in the log, and the same with `done` and `total` for the parent."""
        line = {k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in record.items()}
        with naming(self._path), self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._progress:
            with naming(self._progress), open(self._progress, "a") as file:
                file.write(json.dumps({"done": line["step"], **line}) + "\n")


def finite(measures: dict[str, Any]) -> dict[str, Any]:
    """Without what was not measured, as the loss of steps in which no token has any."""
    return {k: v for k, v in measures.items() if v is not None and not (isinstance(v, float) and not math.isfinite(v))}


def read_log(output_dir: Path) -> list[dict[str, Any]]:
    """The lines of a training log, without those that a crash has cut off or spoilt."""
    path = output_dir / LOG_NAME
    if not path.exists():
        return []
    lines = []
    for text in path.read_bytes().splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # no JSON, or no text
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def last_loss(lines: Sequence[dict[str, Any]]) -> float:
    """Of the last logged step; nan where it has none."""
    loss = next((line["loss"] for line in reversed(lines) if "loss" in line), None)
    return math.nan if loss is None else loss


def curve(lines: Sequence[dict[str, Any]], name: str) -> dict[int, float | None]:
    """Step → one figure of the log, for at most `CURVE_POINTS` steps, the first and the last included."""
    points = [(line["step"], line[name]) for line in lines if name in line]
    stride = math.ceil(max(len(points) - 1, 1) / (CURVE_POINTS - 1))
    return dict([*points[:-1:stride], *points[-1:]])
