"""What a run says about itself while it goes: progress lines for the parent process, and a log that survives resuming.

`$MCAFLOW_PROGRESS`     JSON lines for whoever watches; may repeat steps after a resume
`training_log.jsonl`    one line per logged step, each step once, whatever was interrupted
"""

import json
import math
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mca_lib.trainers.engine import StepMetrics

LOG_NAME = "training_log.jsonl"


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


class Stopwatch:
    """Tokens per second since the last line, and the time left by the speed of this attempt."""

    def __init__(self, step: int) -> None:
        self._first_step = step
        self._began = self._last = time.monotonic()
        self._tokens = 0

    def add(self, tokens: int) -> None:
        self._tokens += tokens

    def read(self, step: int, total: int) -> dict[str, float]:
        """Also starts the next interval."""
        now = time.monotonic()
        speed = self._tokens / max(now - self._last, 1e-9)
        per_step = (now - self._began) / max(step - self._first_step, 1)
        self._last, self._tokens = now, 0
        return {"tokens_per_second": round(speed, 1), "eta_seconds": round(per_step * (total - step), 1)}


class TrainingLog:
    """Writes both files; rank 0 only."""

    def __init__(self, output_dir: Path, resumed_step: int) -> None:
        self._path = output_dir / LOG_NAME
        self._progress = os.environ.get("MCAFLOW_PROGRESS")
        keep = [line for line in read_log(output_dir) if line["step"] <= resumed_step]
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in keep))
        os.replace(temporary, self._path)

    def write(self, record: dict[str, Any]) -> None:
        """One line in the log, and the same with `done` and `total` for the parent."""
        line = {k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in record.items()}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._progress:
            with open(self._progress, "a") as file:
                file.write(json.dumps({"done": line["step"], **line}) + "\n")


def read_log(output_dir: Path) -> list[dict[str, Any]]:
    """The lines of a training log; a last line that was cut off by a crash is left out."""
    path = output_dir / LOG_NAME
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
