"""`McaTrainer`: the training loop of pretraining and supervised fine-tuning on Megatron-Core.

    resume → [ batch → step → log → evaluate? → save? ]* → evaluate → final checkpoint → train_result.json

Every rank runs the same loop; rank 0 writes the files. SIGTERM is answered at the end of the step: all ranks agree,
save a checkpoint and leave with status 143.
"""

import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from transformers.trainer_utils import IntervalStrategy

from mca_lib.checkpoint.sealed import move_into_place, new_staging
from mca_lib.checkpoint.training import TrainerState, find_checkpoint, layout, load_checkpoint, save_checkpoint
from mca_lib.data.token_store import TokenStore
from mca_lib.errors import ConfigError
from mca_lib.models import VirtualModels
from mca_lib.platforms import current_platform
from mca_lib.trainers.batches import Alignment, MicroBatch, collate
from mca_lib.trainers.engine import Engine, StepMetrics
from mca_lib.trainers.progress import Stopwatch, Totals, TrainingLog
from mca_lib.trainers.schedule import BatchShape, Schedule
from mca_lib.trainers.training_args import TrainingArguments

RESULT_NAME = "train_result.json"
EXIT_ON_SIGTERM = 128 + signal.SIGTERM
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """What came out, as written to `train_result.json`."""

    steps: int
    epochs: float
    final_loss: float | None
    """Of the last logged step."""
    train_loss: float | None
    """Token mean over the whole run."""
    eval_loss: float | None
    """Token mean over the evaluation split after the last step; None without one."""
    tokens: int
    """Tokens that went through the model, padding excluded."""
    trained_tokens: int
    """Tokens with loss."""
    tokens_per_second: float
    seconds: float
    """Spent in steps, over all attempts."""
    peak_memory_mb: list[float]
    """By rank."""
    world_size: int


class McaTrainer:
    """Trains model chunks on a token store.

    Args:
        model: this rank's chunks with their weights.
        args: training arguments; the process groups of their layout exist.
        train_dataset: rows to learn from.
        eval_dataset: held-out rows.
    """

    def __init__(
        self,
        model: VirtualModels,
        args: TrainingArguments,
        train_dataset: TokenStore,
        eval_dataset: TokenStore | None = None,
    ) -> None:
        if eval_dataset is None and args.eval_strategy != IntervalStrategy.NO:
            raise ConfigError(
                f"eval_strategy={args.eval_strategy.value!r}, but the token store has no split 'eval': "
                "hold rows out, or use eval_strategy='no'"
            )
        self.model, self.args = model, args
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.shape = args.batch_shape(dist.get_world_size())
        self.schedule = Schedule(
            num_rows=len(train_dataset),
            global_batch_size=self.shape.global_batch_size,
            seed=args.seed,
            num_train_epochs=args.num_train_epochs,
            max_steps=args.max_steps,
        )
        self.engine = Engine(list(model), args, self.schedule.total_steps)
        self.output_dir = Path(args.output_dir)
        self.final_dir = Path(args.final_dir) if args.final_dir else self.output_dir / "final"
        self._alignment = Alignment.of(args)
        self._is_rank_0 = dist.get_rank() == 0

    def train(self) -> TrainResult:
        """Train to the end, from the newest checkpoint in `output_dir` if there is one.

        Raises:
            ConfigError: loss or gradient norm is not finite any more.
            SystemExit: with status 143 after SIGTERM, when the checkpoint is written.
        """
        step, totals = self._resume()
        records = TrainingLog(self.output_dir, step) if self._is_rank_0 else None
        total, watch, final_loss = self.schedule.total_steps, Stopwatch(step), math.nan
        with _StopRequest() as stop:
            while step < total:
                began = time.monotonic()
                learning_rate = self.engine.learning_rate
                metrics = self.engine.train_step(
                    self._batches(self.train_dataset, self.schedule.rows(step), self.shape)
                )
                step += 1
                totals.add(metrics, time.monotonic() - began)
                watch.add(metrics.tokens)
                self._check_finite(step, metrics)
                if step % max(1, int(self.args.logging_steps)) == 0 or step == total:
                    final_loss = totals.window_loss()
                    if records:
                        records.write(self._record(step, final_loss, metrics, learning_rate, watch.read(step, total)))
                if step < total and self.args.evaluates_at(step, self.schedule.steps_per_epoch):
                    self._evaluate_and_log(step, records)
                stopping = self.engine.any_rank(stop.requested) and step < total
                if stopping or (step < total and self.args.saves_at(step, self.schedule.steps_per_epoch)):
                    self._save(step, totals)
                if stopping:
                    log.warning("stopped by SIGTERM after step %d of %d; a checkpoint was written", step, total)
                    sys.exit(EXIT_ON_SIGTERM)
        eval_loss = self._evaluate_and_log(step, records) if self.eval_dataset is not None else None
        self.save_model(self.final_dir)
        return self._finish(totals, final_loss, eval_loss)

    def evaluate(self) -> StepMetrics:
        """Token sums over the whole evaluation split; every row counts once."""
        assert self.eval_dataset is not None, "evaluate() needs an eval_dataset"
        replicas = self.shape.data_parallel_size
        shape = BatchShape(
            global_batch_size=self.args.per_device_eval_batch_size * replicas * self.shape.micro_batch_multiple,
            micro_batch_size=self.args.per_device_eval_batch_size,
            data_parallel_size=replicas,
            micro_batch_multiple=self.shape.micro_batch_multiple,
        )
        loss_sum, loss_tokens, tokens = 0.0, 0, 0
        for start in range(0, len(self.eval_dataset), shape.global_batch_size):
            rows = range(start, min(start + shape.global_batch_size, len(self.eval_dataset)))
            metrics = self.engine.evaluate_step(self._batches(self.eval_dataset, rows, shape))
            loss_sum += metrics.loss_sum
            loss_tokens += metrics.loss_tokens
            tokens += metrics.tokens
        return StepMetrics(loss_sum, loss_tokens, tokens, math.nan)

    def save_model(self, directory: Path) -> None:
        """Write the MCA checkpoint directory of the weights as they are now, whole or not at all."""
        box = [str(new_staging(directory.parent)) if self._is_rank_0 else None]
        dist.broadcast_object_list(box, src=0)
        self.model.save_pretrained(Path(box[0]))
        if self._is_rank_0:
            move_into_place(Path(box[0]), directory)
        dist.barrier()

    def _resume(self) -> tuple[int, Totals]:
        self.output_dir.mkdir(parents=True, exist_ok=True)
        found = find_checkpoint(self.output_dir, self._run_identity())
        if found is None:
            return 0, Totals()
        state = load_checkpoint(found, self.engine, self.args.seed)
        log.info("resuming from %s", found)
        return state.step, Totals(**state.totals)

    def _save(self, step: int, totals: Totals) -> None:
        state = TrainerState(step, totals.to_dict(), self._run_identity(), layout(self.engine))
        save_checkpoint(self.output_dir, self.engine, state, self.args.save_total_limit)

    def _run_identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be resumed; the layout may differ."""
        args = self.args
        return {
            "rows": len(self.train_dataset),
            "tokens": self.train_dataset.num_tokens,
            "total_steps": self.schedule.total_steps,
            "global_batch_size": self.shape.global_batch_size,
            "seed": args.seed,
            "precision": "bf16" if args.bf16 else "fp32",
            "learning_rate": args.learning_rate,
            "min_learning_rate": args.min_learning_rate,
            "lr_scheduler_type": args.lr_scheduler_type.value,
            "warmup_steps": args.get_warmup_steps(self.schedule.total_steps),
            "weight_decay": args.weight_decay,
            "adam": [args.adam_beta1, args.adam_beta2, args.adam_epsilon],
            "max_grad_norm": args.max_grad_norm,
        }

    def _batches(self, store: TokenStore, rows: Sequence[int], shape: BatchShape) -> list[MicroBatch]:
        """This rank's micro batches of one step; all of one length where pipeline stages exchange them."""
        dealt = shape.deal(rows, parallel_state.get_data_parallel_rank())
        loaded = [[store[row] for row in places if row is not None] for places in dealt]
        lengths = [self._alignment.length(rows) for rows in loaded]
        if self.args.pipeline_model_parallel_size > 1:
            lengths = [max(lengths)] * len(lengths)
        return [
            collate(
                rows,
                length,
                self._alignment,
                self.engine.device,
                parallel_state.get_context_parallel_rank(),
                parallel_state.get_context_parallel_world_size(),
            )
            for rows, length in zip(loaded, lengths, strict=True)
        ]

    def _check_finite(self, step: int, metrics: StepMetrics) -> None:
        for name, value in (("loss", metrics.loss if metrics.loss_tokens else 0.0), ("grad_norm", metrics.grad_norm)):
            if not math.isfinite(value):
                raise ConfigError(
                    f"training diverged: {name} is {value} at step {step}; "
                    f"lower learning_rate={self.args.learning_rate} or lengthen the warm-up"
                )

    def _record(
        self, step: int, loss: float, metrics: StepMetrics, learning_rate: float, speed: dict[str, float]
    ) -> dict[str, Any]:
        return {
            "step": step,
            "total": self.schedule.total_steps,
            "epoch": round(self.schedule.epoch_at(step), 4),
            "loss": loss,
            "grad_norm": metrics.grad_norm,
            "learning_rate": learning_rate,
            **speed,
            "memory_mb": round(current_platform().peak_memory_bytes() / 2**20, 1),
        }

    def _evaluate_and_log(self, step: int, records: TrainingLog | None) -> float:
        loss = self.evaluate().loss
        if records:
            records.write({"step": step, "total": self.schedule.total_steps, "eval_loss": loss})
        return loss

    def _finish(self, totals: Totals, final_loss: float, eval_loss: float | None) -> TrainResult:
        peaks: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(peaks, round(current_platform().peak_memory_bytes() / 2**20, 1))
        result = TrainResult(
            steps=self.schedule.total_steps,
            epochs=round(self.schedule.epoch_at(self.schedule.total_steps), 4),
            final_loss=_finite(final_loss),
            train_loss=totals.loss_sum / totals.loss_tokens if totals.loss_tokens else None,
            eval_loss=None if eval_loss is None else _finite(eval_loss),
            tokens=totals.tokens,
            trained_tokens=totals.loss_tokens,
            tokens_per_second=round(totals.tokens / max(totals.seconds, 1e-9), 1),
            seconds=round(totals.seconds, 3),
            peak_memory_mb=peaks,
            world_size=dist.get_world_size(),
        )
        if self._is_rank_0:  # its presence says that the run has come to its end
            temporary = self.output_dir / f".{RESULT_NAME}"
            temporary.write_text(json.dumps(asdict(result), indent=1))
            os.replace(temporary, self.output_dir / RESULT_NAME)
        return result


class _StopRequest:
    """Remembers SIGTERM while it is entered. Signals reach the main thread only; elsewhere nothing is installed."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "_StopRequest":
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._former = signal.signal(signal.SIGTERM, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        if self._main:
            signal.signal(signal.SIGTERM, self._former)

    def _remember(self, *_: object) -> None:
        self.requested = True


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
