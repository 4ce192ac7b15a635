"""transformers' callbacks in the Megatron loop: what they are told, and what they may ask for.

Every callback runs on every rank, as in transformers (`state.is_world_process_zero` says which one writes). The
trackers of `report_to` are callbacks too, on rank 0 alone. What a callback sets in `TrainerControl` on any rank is
done on all of them. Megatron's schedule makes a whole step in one call and rows follow from the step number, so a
callback on substeps or optimizer steps, and `should_epoch_stop`, are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState

from mca_lib.errors import ConfigError
from mca_lib.models import VirtualModels
from mca_lib.platforms import current_platform
from mca_lib.trainers.engine import Engine
from mca_lib.trainers.progress import Totals
from mca_lib.trainers.schedule import Schedule
from mca_lib.trainers.tracking import tracker_callbacks
from mca_lib.trainers.training_args import TrainingArguments

NEVER_CALLED = ("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end")


@dataclass(frozen=True)
class Wishes:
    """What is to be done now, the same on every rank."""

    log: bool
    evaluate: bool
    save: bool
    stop: bool
    """End training here, as if it had been planned so."""
    terminated: bool
    """SIGTERM has reached some rank."""


class Callbacks:
    """Keeps transformers' state and calls its callbacks.

    Args:
        callbacks: instances or classes.
        args: training arguments.
        model: this rank's chunks, handed to the callbacks as `model`.
        engine: has optimizer and schedule.
        schedule: the steps of the run.

    Raises:
        ConfigError: a callback waits for an event that never comes.
    """

    def __init__(
        self,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]],
        args: TrainingArguments,
        model: VirtualModels,
        engine: Engine,
        schedule: Schedule,
    ) -> None:
        self.args, self.schedule = args, schedule
        is_rank_0 = dist.get_rank() == 0
        self.control = TrainerControl()
        self.state = TrainerState(
            max_steps=schedule.total_steps,
            logging_steps=max(1, int(args.logging_steps)),
            eval_steps=int(args.eval_steps or args.logging_steps),
            save_steps=int(args.save_steps),
            train_batch_size=args.per_device_train_batch_size,
            num_train_epochs=args.num_train_epochs,
            is_local_process_zero=args.local_process_index == 0,
            is_world_process_zero=is_rank_0,
        )
        own = [_Flow(schedule.steps_per_epoch), *callbacks]
        self._handlers = [CallbackHandler(own, model, None, engine.optimizer, engine.scheduler)]
        for callback in self._handlers[0].callbacks:
            _refuse_silent(callback)
        if is_rank_0 and args.report_to:
            shown = _TrackedModel(PretrainedConfig(**model.mca_config.hf_config), model.num_parameters(total=True))
            trackers = [_NoFlow, *tracker_callbacks(args.report_to)]
            self._handlers.append(CallbackHandler(trackers, shown, None, engine.optimizer, engine.scheduler))
        self._tell("on_init_end")

    def begin(self, step: int, history: list[dict[str, Any]], totals: Totals) -> None:
        """Training starts after `step` steps, with the log and the counters so far."""
        saved = totals.callbacks
        self.state.log_history = history
        self.state.num_input_tokens_seen = totals.tokens
        self.state.best_metric = saved.get("best_metric")
        self.state.best_global_step = saved.get("best_global_step")
        self._restore(saved.get("callbacks", {}))
        self._at(step)
        self._tell("on_train_begin")
        self.control.should_training_stop |= self.had_stopped(totals)

    def step_begin(self, step: int) -> None:
        """The step after `step` finished ones."""
        if step % self.schedule.steps_per_epoch == 0:
            self._tell("on_epoch_begin")
        self._tell("on_step_begin")

    def step_end(self, step: int, tokens: int) -> None:
        """`step` steps are done, with so many tokens."""
        self._at(step)
        self.state.num_input_tokens_seen = tokens
        self._tell("on_step_end")
        if step % self.schedule.steps_per_epoch == 0:
            self._tell("on_epoch_end")

    def log(self, measures: dict[str, Any]) -> None:
        self.state.log_history.append({**measures, "step": self.state.global_step})
        self._tell("on_log", logs=dict(measures))

    def evaluated(self, measures: dict[str, Any]) -> None:
        """After an evaluation, whose measures were logged. Keeps the best by `metric_for_best_model`."""
        self._tell("on_evaluate", metrics=dict(measures))
        name = self.args.metric_for_best_model
        if name is None:
            return
        value = measures.get(name if name.startswith("eval_") else f"eval_{name}")
        best = self.state.best_metric
        if value is not None and (best is None or (value > best if self.args.greater_is_better else value < best)):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step

    def saved(self, step: int) -> None:
        """`checkpoint-<step>` is whole; where it was written while training went on, some steps are done since."""
        now = self.state.global_step
        self._at(step)
        self._tell("on_save")
        self._at(now)

    def end(self) -> None:
        self._tell("on_train_end")

    def wishes(self, terminated: bool) -> Wishes:
        """What any rank asks for. All ranks take part."""
        control = self.control
        if control.should_epoch_stop:
            raise ConfigError(
                "a callback set should_epoch_stop: epochs cannot be cut short here; should_training_stop can"
            )
        flags = (
            control.should_log,
            control.should_evaluate,
            control.should_save,
            control.should_training_stop,
            terminated,
        )
        agreed = torch.tensor(flags, dtype=torch.int32, device=current_platform().device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        wishes = Wishes(*map(bool, agreed.tolist()))
        self._stopped = wishes.stop
        return wishes

    def to_save(self) -> dict[str, Any]:
        """What a checkpoint keeps for `begin`."""
        stateful = [c for c in self._handlers[0].callbacks if isinstance(c, ExportableState)]
        return {
            "best_metric": self.state.best_metric,
            "best_global_step": self.state.best_global_step,
            "stopped": self._stopped,
            "callbacks": TrainerState(stateful_callbacks=stateful).stateful_callbacks,
        }

    @staticmethod
    def had_stopped(totals: Totals) -> bool:
        """A callback had ended training at the step of the checkpoint that has these counters."""
        return bool(totals.callbacks.get("stopped"))

    def _restore(self, saved: dict[str, Any]) -> None:
        """As transformers does: a callback is made anew from its state."""
        callbacks = self._handlers[0].callbacks
        for name, states in saved.items():
            places = [i for i, callback in enumerate(callbacks) if type(callback).__name__ == name]
            for place, state in zip(places, states if isinstance(states, list) else [states], strict=False):
                callbacks[place] = type(callbacks[place]).from_state(state)

    def _at(self, step: int) -> None:
        self.state.global_step = step
        self.state.epoch = self.schedule.epoch_at(step)

    def _tell(self, event: str, **details: Any) -> None:
        for handler in self._handlers:
            self.control = getattr(handler, event)(self.args, self.state, self.control, **details)


class _NoFlow(DefaultFlowCallback):
    """transformers' handler asks for a flow callback, and the trackers' handler has nothing to decide."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        pass

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        pass


class _Flow(_NoFlow):
    """What is due by the arguments. The last step is always logged; what else comes last is the trainer's business."""

    def __init__(self, steps_per_epoch: int) -> None:
        self.steps_per_epoch = steps_per_epoch

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        step, last = state.global_step, state.global_step >= state.max_steps
        control.should_log = last or args.logs_at(step, self.steps_per_epoch)
        control.should_evaluate = not last and args.evaluates_at(step, self.steps_per_epoch)
        control.should_save = not last and args.saves_at(step, self.steps_per_epoch)


@dataclass(frozen=True)
class _TrackedModel:
    """What trackers of experiments read of a model: transformers' config, and its size."""

    config: PretrainedConfig
    size: int

    def num_parameters(self) -> int:
        return self.size


def _refuse_silent(callback: TrainerCallback) -> None:
    for event in NEVER_CALLED:
        if getattr(type(callback), event) is not getattr(TrainerCallback, event):
            raise ConfigError(
                f"callback {type(callback).__name__} waits for {event}, which the Megatron trainer has not: a step is "
                "one call; use on_step_end"
            )
