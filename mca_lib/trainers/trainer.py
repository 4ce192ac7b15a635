"""`McaTrainer`: the training loop on Megatron-Core, as it is for pretraining and supervised fine-tuning.

    resume → [ batch → step → log? → evaluate? → save? ]* → evaluate → final checkpoint → train_result.json

Every rank runs the same loop; rank 0 writes the files. What is due after a step is said by the arguments and by
transformers' callbacks, and agreed upon by all ranks (`callbacks`). Where checkpoints are written, the last step has
one too: whatever happens after it costs no step. SIGTERM is answered at the end of the step: all ranks save a
checkpoint and leave with status 143. After the last step they come to the end first.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from mca_lib.checkpoint.collective import from_rank_0
from mca_lib.checkpoint.retention import Retention
from mca_lib.checkpoint.saver import CheckpointSaver
from mca_lib.checkpoint.sealed import remove_leftovers
from mca_lib.checkpoint.training import TrainerState, layout
from mca_lib.data.indexed_rows import Rows
from mca_lib.data.token_store import Row
from mca_lib.errors import ConfigError
from mca_lib.models import VirtualModels
from mca_lib.platforms import current_platform
from mca_lib.trainers.batches import Alignment, MicroBatch, collate
from mca_lib.trainers.best import BestModel, best_identity, save_sealed
from mca_lib.trainers.callbacks import Callbacks, Wishes
from mca_lib.trainers.divergence import refuse_divergence
from mca_lib.trainers.engine import Engine, StepMetrics
from mca_lib.trainers.evaluation import evaluation_rows, evaluation_shape, total
from mca_lib.trainers.identity import identify_model, identify_rows, run_identity
from mca_lib.trainers.loss import Objective, TokenObjective
from mca_lib.trainers.peak import flops_counter, peak_flops
from mca_lib.trainers.preflight import Preflight, longest, preflight
from mca_lib.trainers.progress import Meter, Totals, TrainingLog, finite, last_loss, read_log
from mca_lib.trainers.result import TrainResult
from mca_lib.trainers.resume import resume, source_identity
from mca_lib.trainers.row_checks import check_loss, check_rows
from mca_lib.trainers.schedule import BatchShape
from mca_lib.trainers.stopping import StopRequest, leave_after, leave_if_requested
from mca_lib.trainers.training_args import TrainingArguments
from mca_lib.trainers.vision_batches import collator_of

log = logging.getLogger(__name__)


class McaTrainer:
    """Trains model chunks on a token store.

    Args:
        model: this rank's chunks with their weights.
        args: training arguments; the process groups of their layout exist.
        train_dataset: rows to learn from.
        eval_dataset: held-out rows.
        callbacks: transformers' callbacks, instances or classes; see `mca_lib.trainers.callbacks`.
    """

    def __init__(
        self,
        model: VirtualModels,
        args: TrainingArguments,
        train_dataset: Rows,
        eval_dataset: Rows | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] = (),
    ) -> None:
        if eval_dataset is None and args.eval_strategy != IntervalStrategy.NO:
            raise ConfigError(
                f"eval_strategy={args.eval_strategy.value!r}, but the token store has no split 'eval': "
                "hold rows out, or use eval_strategy='no'"
            )
        self.model, self.args = model, args
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.shape = args.batch_shape(dist.get_world_size())
        self.schedule = args.schedule(len(train_dataset), self.shape)
        self.engine = Engine(list(model), args, self.schedule.total_steps, self._objective())
        self.output_dir = Path(args.output_dir)
        self.final_dir = Path(args.final_dir) if args.final_dir else self.output_dir / "final"
        keep = Retention(args.save_total_limit, args.save_keep_every)
        self._saver = CheckpointSaver(self.output_dir, self.engine, keep)
        self._best = BestModel(self.output_dir, model) if args.load_best_model_at_end else None
        self._alignment = Alignment.of(args)
        splits = [store for store in (train_dataset, eval_dataset) if store is not None]
        self._images = {id(store): collator_of(model.mca_config, store) for store in splits}
        self._is_rank_0 = dist.get_rank() == 0
        self.callbacks = Callbacks(callbacks, args, model, self.engine, self.schedule)
        self._told_saved: int | None = None
        self._flops = flops_counter(model.mca_config, model.lora_config, args.freeze)

    def train(self) -> TrainResult:
        """Train to the end, from the newest checkpoint in `output_dir` if there is one.

        Raises:
            ConfigError: loss or gradient norm is not finite any more.
            SystemExit: with status 143 after SIGTERM, when the checkpoint, or after the last step the result, is
                written.
        """
        self._prepare()
        tried = preflight(self.engine, self._longest_batches(), self.output_dir) if self.args.preflight else None
        peak = peak_flops(self.output_dir, self.args.params_dtype)
        step, totals = self._resume()
        with StopRequest() as stop:
            result = self._train(step, totals, peak, tried, stop)
            leave_if_requested(stop)
        return result

    def _train(self, step: int, totals: Totals, peak: float, tried: Preflight | None, stop: StopRequest) -> TrainResult:
        """From `step` to the end."""
        last, held_out, evaluated_at = self.schedule.total_steps, {}, None
        wishes = self._begin(step, totals)
        loss = last_loss(self.callbacks.state.log_history)
        meter = Meter(step, last, dist.get_world_size(), peak)
        while step < last and not wishes.stop:
            self.callbacks.step_begin(step)
            began, learning_rate = time.monotonic(), self.engine.learning_rate
            rows = self.schedule.rows(step)
            batches = self._batches(self.train_dataset, rows, self.shape)
            waited = time.monotonic() - began
            metrics = self.engine.train_step(batches)
            seconds = time.monotonic() - began
            step += 1
            totals.add(metrics, seconds)
            meter.add(seconds, waited, metrics.tokens, self._flops(self.train_dataset.lengths_of(rows)))
            refuse_divergence(step, metrics, rows, self.train_dataset.path, self.args.learning_rate)
            self._saver.poll()
            self._tell_saved()
            self.callbacks.step_end(step, totals.tokens)
            wishes = self.callbacks.wishes(stop.requested)
            if wishes.log or wishes.stop:
                loss = self._log_steps(step, totals, metrics, learning_rate, meter)
            if wishes.evaluate:
                held_out, evaluated_at = self._evaluate_and_log(step), step
            if wishes.log or wishes.evaluate:  # callbacks were asked again
                wishes = self.callbacks.wishes(stop.requested)
            is_last = step == last or wishes.stop
            if wishes.save or wishes.terminated or (is_last and self.args.saves):
                self._save(step, totals)
            if wishes.terminated:
                self._saver.finish()
                leave_after(step, last)
        self._saver.finish()
        self._tell_saved()
        if self.eval_dataset is not None and evaluated_at != step:
            held_out = self._evaluate_and_log(step)
        if self._best:
            self._best.publish(self.final_dir)
        else:
            self.save_model(self.final_dir)
        return self._finish(step, totals, loss, held_out, tried)

    def evaluate(self) -> StepMetrics:
        """Sums over the whole evaluation split; every row counts once."""
        return total([self.engine.evaluate_step(batches) for batches in self._evaluation_batches()])

    def _evaluation_batches(self) -> Iterator[list[MicroBatch]]:
        """This rank's micro batches of each step of an evaluation, always the same."""
        if self.eval_dataset is None:
            raise ConfigError("an evaluation needs held-out rows: give an eval_dataset")
        shape = evaluation_shape(self.args, self.shape)
        for rows in evaluation_rows(len(self.eval_dataset), shape):
            yield self._batches(self.eval_dataset, rows, shape)

    def save_model(self, directory: Path) -> None:
        """Write the MCA checkpoint directory of the weights as they are now, whole or not at all."""
        self.engine.gather_weights()
        save_sealed(self.model, directory, {})

    def _objective(self) -> Objective:
        return TokenObjective()

    def _prepare(self) -> None:
        """What has to be done with the weights that the model came with, before any checkpoint is loaded."""
        self.output_dir.mkdir(parents=True, exist_ok=True)
        # A save that was killed may fill the disk, and the preflight needs its room.
        from_rank_0(lambda: remove_leftovers(self.output_dir))
        from_rank_0(self._check_rows)
        identify_model(self.model)
        self._source = source_identity(self.args)
        for store in filter(None, (self.train_dataset, self.eval_dataset)):
            identify_rows(store)

    def _check_rows(self) -> None:
        for store in filter(None, (self.train_dataset, self.eval_dataset)):
            check_rows(store, self.model.mca_config)
        check_loss(self.train_dataset, "train on")
        if self.eval_dataset is not None and self.args.eval_strategy is not IntervalStrategy.NO:
            check_loss(self.eval_dataset, "evaluate")

    def _longest_batches(self) -> list[MicroBatch]:
        """Micro batches of the longest rows that are trained on, as many as the pipeline holds at a time."""
        store, shape = self.train_dataset, self.shape
        trained = self.schedule.trained_rows
        rows = [store[row] for row in trained[longest(store.row_lengths[trained], shape.micro_batch_size)].tolist()]
        held = self.args.pipeline_model_parallel_size * (2 if len(self.model) > 1 else 1)
        count = min(shape.micro_batches(shape.global_batch_size), held)
        return [self._collate(store, rows, self._alignment.length(rows))] * count

    def _begin(self, step: int, totals: Totals) -> Wishes:
        """Open the log after `step` steps, and tell the callbacks. Returns what they wish before a step."""
        is_over = step == self.schedule.total_steps or Callbacks.had_stopped(totals)
        self._log = TrainingLog(self.output_dir, step, is_over=is_over) if self._is_rank_0 else None
        self.callbacks.begin(step, from_rank_0(lambda: read_log(self.output_dir)), totals)
        return self.callbacks.wishes(terminated=False)

    def _resume(self) -> tuple[int, Totals]:
        return resume(self.output_dir, self.engine, self.model.mca_config, self._run_identity(), self._best)

    def _save(self, step: int, totals: Totals) -> None:
        totals.callbacks = self.callbacks.to_save()
        best = self._best.found if self._best else None
        state = TrainerState(step, totals.to_dict(), self._run_identity(), layout(self.engine), best)
        self._saver.begin(state, going_on=self.args.async_save)
        if not self.args.async_save:
            self._saver.finish()
            self._tell_saved()

    def _tell_saved(self) -> None:
        """A checkpoint that was begun some steps ago may have become whole."""
        if self._saver.saved_step not in (None, self._told_saved):
            self._told_saved = self._saver.saved_step
            self.callbacks.saved(self._told_saved)

    def _run_identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be resumed; the layout may differ."""
        identity = run_identity(self.model, self.args, self.train_dataset, self.schedule, self.shape)
        return identity | self._source | best_identity(self.args, self.eval_dataset)

    def _batches(self, store: Rows, rows: Sequence[int], shape: BatchShape) -> list[MicroBatch]:
        """This rank's micro batches of one step; all of one length where pipeline stages exchange them."""
        dealt = shape.deal(rows, parallel_state.get_data_parallel_rank())
        loaded = [[store[row] for row in places if row is not None] for places in dealt]
        lengths = [self._alignment.length(rows) for rows in loaded]
        if self.args.pipeline_model_parallel_size > 1:
            lengths = [max(lengths)] * len(lengths)
        return [self._collate(store, rows, length) for rows, length in zip(loaded, lengths, strict=True)]

    def _collate(self, store: Rows, rows: Sequence[Row], length: int) -> MicroBatch:
        """One micro batch of `rows`, which are of `store`."""
        batch = collate(
            rows,
            length,
            self._alignment,
            self.engine.device,
            parallel_state.get_context_parallel_rank(),
            parallel_state.get_context_parallel_world_size(),
        )
        images = self._images[id(store)]
        return batch if images is None else images(batch, rows)

    def _log_steps(self, step: int, totals: Totals, metrics: StepMetrics, learning_rate: float, meter: Meter) -> float:
        """A line of the log over the steps since the last one. Returns its loss."""
        means = totals.window_means()
        self._write(
            step,
            {
                "epoch": round(self.schedule.epoch_at(step), 4),
                **means,
                "grad_norm": metrics.grad_norm,
                "learning_rate": learning_rate,
                **self.engine.scaling_measures(),
                **meter.read(step),
                "memory_mb": round(current_platform().peak_memory_bytes() / 2**20, 1),
                **self.engine.expert_measures(),
            },
        )
        return means["loss"]

    def _evaluate_and_log(self, step: int) -> dict[str, float]:
        began = time.monotonic()
        means = self.evaluate().means
        measures = {f"eval_{name}": value for name, value in means.items()}
        measures |= {"eval_runtime": round(time.monotonic() - began, 3), "epoch": self.schedule.epoch_at(step)}
        self._write(step, measures)
        self.callbacks.evaluated(finite(measures))
        if self._best:
            self._best.offer(step, means["loss"])
        return means

    def _write(self, step: int, measures: dict[str, float]) -> None:
        """To the log, to the parent process, and to the callbacks."""
        if self._log:
            self._log.write({"step": step, "total": self.schedule.total_steps, **measures})
        self.callbacks.log(finite(measures))

    def _finish(
        self, step: int, totals: Totals, final_loss: float, held_out: dict[str, float], tried: Preflight | None
    ) -> TrainResult:
        best = self._best.found if self._best else None
        result = TrainResult.of(step, self.schedule.epoch_at(step), totals, final_loss, held_out, best, tried)
        if self._is_rank_0:
            result.write(self.output_dir)
        self.callbacks.log(finite({"train_loss": result.train_loss, "train_runtime": result.seconds}))
        self.callbacks.end()
        return result
