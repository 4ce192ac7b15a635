"""Log, checkpoints and SIGTERM of a run by transformers' Trainer, in the files and the format of `McaTrainer`.

The Trainer writes a checkpoint into its own folder, with its own files. It is then sealed like any other and moved to
`<output_dir>/checkpoint-N`, so a run resumes from whole checkpoints alone.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainingArguments
from transformers import TrainerState as HfState

from mca_lib.checkpoint.collective import from_rank_0
from mca_lib.checkpoint.retention import PREFIX, STATE_NAME, Retention
from mca_lib.checkpoint.sealed import seal
from mca_lib.checkpoint.training import TrainerState
from mca_lib.errors import ConfigError
from mca_lib.platforms import current_platform
from mca_lib.trainers.engine import StepMetrics
from mca_lib.trainers.llama_factory.rows import MicroBatches
from mca_lib.trainers.progress import Meter, Totals, TrainingLog, last_loss, read_log
from mca_lib.trainers.result import TrainResult
from mca_lib.trainers.schedule import Schedule
from mca_lib.trainers.stopping import StopRequest, leave_after, leave_if_requested


class Record(TrainerCallback):
    """What one rank knows of the run. The trainer reports losses, measures and log lines to it.

    Args:
        output_dir: gets log, checkpoints and result.
        schedule: of the steps.
        train: micro batches of the training split.
        in_pairs: the loss is a mean over pairs, not over tokens.
        run: what the run is about; see `find_checkpoint`.
        keep: which checkpoints stay.
        totals: of the checkpoint that the run goes on from.
        step: its number.
        meter: of the speed.
        flops: lengths of a step's documents → operations that the model needs for them.
        stop: SIGTERM.
    """

    def __init__(
        self,
        output_dir: Path,
        schedule: Schedule,
        train: MicroBatches,
        *,
        in_pairs: bool,
        run: Mapping[str, Any],
        keep: Retention,
        totals: Totals,
        step: int,
        meter: Meter,
        flops: Callable[[np.ndarray], int],
        stop: StopRequest,
    ) -> None:
        self.output_dir, self.schedule, self.train, self.in_pairs = output_dir, schedule, train, in_pairs
        self.run, self.keep, self.totals, self.stop = dict(run), keep, totals, stop
        self.step, self._meter, self._flops = step, meter, flops
        self.held_out: dict[str, float] = {}
        self._means = {"loss": from_rank_0(lambda: last_loss(read_log(output_dir)))}
        is_over = step == schedule.total_steps
        self._log = TrainingLog(output_dir, step, is_over=is_over) if dist.get_rank() == 0 else None
        self._stopping = False

    def count(self) -> int:
        """Tokens with loss, or pairs, of the step that is under way, over all ranks."""
        counts = self.train.counts(self.step)
        return counts.pairs if self.in_pairs else counts.loss_tokens

    def add_loss(self, loss: torch.Tensor) -> None:
        """A micro batch's loss, of which the mean over ranks of the sums of a step is the step's."""
        self._loss += loss.detach()

    def add_measures(self, sums: Mapping[str, float]) -> None:
        """Sums over what this rank's micro batch counts."""
        for name, value in sums.items():
            self._measures[name] = self._measures.get(name, 0.0) + value

    def fetch(self) -> None:
        """A step begins: its micro batches are made, then `on_step_begin` is called."""
        self._began = time.monotonic()

    def on_step_begin(self, args: TrainingArguments, state: HfState, control: TrainerControl, **_: Any) -> None:
        self._waited = time.monotonic() - self._began
        self._loss = torch.zeros((), dtype=torch.float64, device=args.device)
        self._measures: dict[str, float] = {}

    def on_step_end(self, args: TrainingArguments, state: HfState, control: TrainerControl, **_: Any) -> TrainerControl:
        names = sorted(self._measures)
        own = [float(self.stop.requested), float(self._loss), *(self._measures[name] for name in names)]
        values = torch.tensor(own, dtype=torch.float64, device=args.device)
        dist.all_reduce(values)
        stopping, loss, *measures = values.tolist()
        counts, count = self.train.counts(self.step), self.count()
        sums = {"loss": loss / dist.get_world_size() * count, **dict(zip(names, measures, strict=True))}
        seconds = time.monotonic() - self._began
        self.totals.add(StepMetrics(sums, count, counts.loss_tokens, counts.tokens, math.nan), seconds)
        self._meter.add(seconds, self._waited, counts.tokens, self._flops(counts.lengths_D))
        self.step += 1
        self._check_finite("loss", loss, args)
        last = self.step == self.schedule.total_steps
        self._stopping = stopping > 0
        control.should_training_stop |= self._stopping
        control.should_save |= self._stopping
        control.should_log |= last
        control.should_evaluate &= not last  # that comes when training has ended
        return control

    def line(self, logs: dict[str, float], args: TrainingArguments) -> dict[str, float]:
        """Write a line of the log; returns the Trainer's own line with the figures of this one."""
        self._check_finite("grad_norm", logs["grad_norm"], args)
        self._means = self.totals.window_means()
        total = self.schedule.total_steps
        line = {
            **self._means,
            "grad_norm": float(logs["grad_norm"]),
            "learning_rate": logs["learning_rate"],
            **self._meter.read(self.step),
            "memory_mb": round(current_platform().peak_memory_bytes() / 2**20, 1),
        }
        epoch = round(self.schedule.epoch_at(self.step), 4)
        if self._log:
            self._log.write({"step": self.step, "total": total, "epoch": epoch, **line})
        return {**logs, **line}

    def evaluated(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Take the sums of an evaluation, and write its means."""
        self.held_out = {name: value / count if count else math.nan for name, value in sums.items()}
        named = {f"eval_{name}": value for name, value in self.held_out.items()}
        if self._log:
            self._log.write({"step": self.step, "total": self.schedule.total_steps, **named})
        return named

    def on_save(self, args: TrainingArguments, state: HfState, control: TrainerControl, **_: Any) -> None:
        """Seal what the Trainer has just written, all ranks their part; after SIGTERM, leave."""
        dist.barrier()
        from_rank_0(lambda: self._seal(Path(args.output_dir) / f"{PREFIX}{self.step}"))
        if self._stopping:
            leave_after(self.step, self.schedule.total_steps)

    def finish(self) -> None:
        """Write the result; all ranks. The trained model is in its place. After SIGTERM, leave."""
        epochs = round(self.schedule.epoch_at(self.step), 4)
        result = TrainResult.of(
            self.step, epochs, self.totals, self._means["loss"], self.held_out, best=None, preflight=None
        )
        if dist.get_rank() == 0:
            result.write(self.output_dir)
        leave_if_requested(self.stop)

    def _seal(self, written: Path) -> None:
        state = TrainerState(self.step, self.totals.to_dict(), self.run, {"world": dist.get_world_size()})
        (written / STATE_NAME).write_text(json.dumps(vars(state), indent=1))
        seal(written, self.output_dir / f"{PREFIX}{self.step}", {"step": self.step})
        self.keep.apply(self.output_dir)

    def _check_finite(self, name: str, value: float, args: TrainingArguments) -> None:
        if not math.isfinite(value):
            raise ConfigError(
                f"training diverged: {name} is {value} at step {self.step}; "
                f"lower learning_rate={args.learning_rate} or lengthen the warm-up"
            )
