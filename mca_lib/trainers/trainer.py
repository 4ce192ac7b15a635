"""`McaTrainer`: the training loop on Megatron-Core, as it is for pretraining and supervised fine-tuning.

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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from transformers.trainer_utils import IntervalStrategy

from mca_lib.adapters.settings import targets_of
from mca_lib.checkpoint.sealed import move_into_place, new_staging
from mca_lib.checkpoint.retention import Retention
from mca_lib.checkpoint.saver import CheckpointSaver
from mca_lib.checkpoint.training import TrainerState, find_checkpoint, layout, load_checkpoint
from mca_lib.data.token_store import Row, TokenStore
from mca_lib.errors import ConfigError
from mca_lib.models import VirtualModels
from mca_lib.platforms import current_platform
from mca_lib.trainers.batches import Alignment, MicroBatch, collate
from mca_lib.trainers.engine import Engine, StepMetrics
from mca_lib.trainers.loss import Objective, TokenObjective
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
    """Mean over the whole run, per token with loss or per pair."""
    eval_loss: float | None
    """The same over the evaluation split after the last step; None without one."""
    eval_measures: dict[str, float | None]
    """What else the objective measures there."""
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
        self.engine = Engine(list(model), args, self.schedule.total_steps, self._objective())
        self.output_dir = Path(args.output_dir)
        self.final_dir = Path(args.final_dir) if args.final_dir else self.output_dir / "final"
        keep = Retention(args.save_total_limit, args.save_keep_every)
        self._saver = CheckpointSaver(self.output_dir, self.engine, keep)
        self._alignment = Alignment.of(args)
        self._is_rank_0 = dist.get_rank() == 0

    def train(self) -> TrainResult:
        """Train to the end, from the newest checkpoint in `output_dir` if there is one.

        Raises:
            ConfigError: loss or gradient norm is not finite any more.
            SystemExit: with status 143 after SIGTERM, when the checkpoint is written.
        """
        self._prepare()
        step, totals = self._resume()
        records = TrainingLog(self.output_dir, step) if self._is_rank_0 else None
        total, watch, means = self.schedule.total_steps, Stopwatch(step), {"loss": math.nan}
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
                self._saver.poll()
                if step % max(1, int(self.args.logging_steps)) == 0 or step == total:
                    means = totals.window_means()
                    if records:
                        records.write(self._record(step, means, metrics, learning_rate, watch.read(step, total)))
                if step < total and self.args.evaluates_at(step, self.schedule.steps_per_epoch):
                    self._evaluate_and_log(step, records)
                stopping = self.engine.any_rank(stop.requested) and step < total
                if stopping or (step < total and self.args.saves_at(step, self.schedule.steps_per_epoch)):
                    self._save(step, totals)
                if stopping:
                    self._saver.finish()
                    log.warning("stopped by SIGTERM after step %d of %d; a checkpoint was written", step, total)
                    sys.exit(EXIT_ON_SIGTERM)
        held_out = self._evaluate_and_log(step, records) if self.eval_dataset is not None else {}
        self._saver.finish()
        self.save_model(self.final_dir)
        return self._finish(totals, means["loss"], held_out)

    def evaluate(self) -> StepMetrics:
        """Sums over the whole evaluation split; every row counts once."""
        steps = [self.engine.evaluate_step(batches) for batches in self._evaluation_batches()]
        sums = {name: sum(step.sums[name] for step in steps) for name in steps[0].sums}
        return StepMetrics(
            sums,
            sum(step.count for step in steps),
            sum(step.loss_tokens for step in steps),
            sum(step.tokens for step in steps),
            math.nan,
        )

    def _evaluation_batches(self) -> Iterator[list[MicroBatch]]:
        """This rank's micro batches of each step of an evaluation, always the same."""
        assert self.eval_dataset is not None, "an evaluation needs an eval_dataset"
        replicas = self.shape.data_parallel_size
        shape = BatchShape(
            global_batch_size=self.args.per_device_eval_batch_size * replicas * self.shape.micro_batch_multiple,
            micro_batch_size=self.args.per_device_eval_batch_size,
            data_parallel_size=replicas,
            micro_batch_multiple=self.shape.micro_batch_multiple,
        )
        for start in range(0, len(self.eval_dataset), shape.global_batch_size):
            rows = range(start, min(start + shape.global_batch_size, len(self.eval_dataset)))
            yield self._batches(self.eval_dataset, rows, shape)

    def save_model(self, directory: Path) -> None:
        """Write the MCA checkpoint directory of the weights as they are now, whole or not at all."""
        box = [str(new_staging(directory.parent)) if self._is_rank_0 else None]
        dist.broadcast_object_list(box, src=0)
        self.model.save_pretrained(Path(box[0]))
        if self._is_rank_0:
            move_into_place(Path(box[0]), directory)
        dist.barrier()

    def _objective(self) -> Objective:
        return TokenObjective()

    def _prepare(self) -> None:
        """What has to be done with the weights that the model came with, before any checkpoint is loaded."""
        self.output_dir.mkdir(parents=True, exist_ok=True)

    def _resume(self) -> tuple[int, Totals]:
        found = find_checkpoint(self.output_dir, self._run_identity())
        if found is None:
            return 0, Totals()
        state = load_checkpoint(found, self.engine, self.args.seed)
        log.info("resuming from %s", found)
        return state.step, Totals(**state.totals)

    def _save(self, step: int, totals: Totals) -> None:
        state = TrainerState(step, totals.to_dict(), self._run_identity(), layout(self.engine))
        self._saver.begin(state, going_on=self.args.async_save)
        if not self.args.async_save:
            self._saver.finish()

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
            **self._adapter_identity(),
        }

    def _adapter_identity(self) -> dict[str, Any]:
        """With adapters a checkpoint has these alone, and must find the model that they were trained on."""
        lora = self.model.lora_config
        if lora is None:
            return {}
        return {
            "base model": self.model.base_digest,
            "lora r": lora.r,
            "lora alpha": lora.lora_alpha,
            "lora dropout": lora.lora_dropout,
            "rslora": lora.use_rslora,
            "lora targets": targets_of(lora),
        }

    def _batches(self, store: TokenStore, rows: Sequence[int], shape: BatchShape) -> list[MicroBatch]:
        """This rank's micro batches of one step; all of one length where pipeline stages exchange them."""
        dealt = shape.deal(rows, parallel_state.get_data_parallel_rank())
        loaded = [[store[row] for row in places if row is not None] for places in dealt]
        lengths = [self._alignment.length(rows) for rows in loaded]
        if self.args.pipeline_model_parallel_size > 1:
            lengths = [max(lengths)] * len(lengths)
        return [self._collate(store, rows, length) for rows, length in zip(loaded, lengths, strict=True)]

    def _collate(self, store: TokenStore, rows: Sequence[Row], length: int) -> MicroBatch:
        """One micro batch of `rows`, which are of `store`."""
        return collate(
            rows,
            length,
            self._alignment,
            self.engine.device,
            parallel_state.get_context_parallel_rank(),
            parallel_state.get_context_parallel_world_size(),
        )

    def _check_finite(self, step: int, metrics: StepMetrics) -> None:
        for name, value in (("loss", metrics.loss if metrics.count else 0.0), ("grad_norm", metrics.grad_norm)):
            if not math.isfinite(value):
                raise ConfigError(
                    f"training diverged: {name} is {value} at step {step}; "
                    f"lower learning_rate={self.args.learning_rate} or lengthen the warm-up"
                )

    def _record(
        self,
        step: int,
        means: dict[str, float],
        metrics: StepMetrics,
        learning_rate: float,
        speed: dict[str, float],
    ) -> dict[str, Any]:
        return {
            "step": step,
            "total": self.schedule.total_steps,
            "epoch": round(self.schedule.epoch_at(step), 4),
            **means,
            "grad_norm": metrics.grad_norm,
            "learning_rate": learning_rate,
            **speed,
            "memory_mb": round(current_platform().peak_memory_bytes() / 2**20, 1),
        }

    def _evaluate_and_log(self, step: int, records: TrainingLog | None) -> dict[str, float]:
        means = self.evaluate().means
        if records:
            named = {f"eval_{name}": value for name, value in means.items()}
            records.write({"step": step, "total": self.schedule.total_steps, **named})
        return means

    def _finish(self, totals: Totals, final_loss: float, held_out: dict[str, float]) -> TrainResult:
        peaks: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(peaks, round(current_platform().peak_memory_bytes() / 2**20, 1))
        result = TrainResult(
            steps=self.schedule.total_steps,
            epochs=round(self.schedule.epoch_at(self.schedule.total_steps), 4),
            final_loss=_finite(final_loss),
            train_loss=totals.loss_sum / totals.count if totals.count else None,
            eval_loss=_finite(held_out["loss"]) if held_out else None,
            eval_measures={name: _finite(value) for name, value in held_out.items() if name != "loss"},
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
