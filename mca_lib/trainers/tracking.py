"""Trackers of experiments: transformers' own callbacks, by the names of `report_to`.

tensorboard    event files in $TENSORBOARD_LOGGING_DIR, or `<output_dir>/runs`
wandb          as its environment variables say; a resumed run is a new one unless $WANDB_RUN_ID names it
mlflow         likewise, with $MLFLOW_RUN_ID
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mca_lib.errors import ConfigError

TRACKERS = ("tensorboard", "wandb", "mlflow")


def tracker_problems(report_to: Sequence[str]) -> list[str]:
    """What is not a tracker or not installed. Imports none of them."""
    problems = [f"{name!r} is not one of {', '.join(TRACKERS)}" for name in report_to if name not in TRACKERS]
    missing = [name for name in report_to if name in TRACKERS and importlib.util.find_spec(name) is None]
    return problems + [f"the package {name} is not installed: install it, or leave it out" for name in missing]


def check_trackers(report_to: Sequence[str]) -> None:
    """Raises ConfigError."""
    for problem in tracker_problems(report_to):
        raise ConfigError(f"report_to: {problem}")


def tracker_callbacks(report_to: Sequence[str]) -> list[Any]:
    """A callback for each name, for one rank."""
    from transformers.integrations import get_reporting_integration_callbacks

    names = [name for name in report_to if name != "tensorboard"]
    callbacks = list(get_reporting_integration_callbacks(names))
    return [*callbacks, _tensorboard()] if "tensorboard" in report_to else callbacks


def _tensorboard() -> Any:
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    class ResumableTensorBoardCallback(TensorBoardCallback):
        """One folder for all attempts. Steps that an attempt makes again are hidden from what was written before."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = self.logging_dir or str(Path(args.output_dir) / "runs")
            self.tb_writer = SummaryWriter(folder, purge_step=state.global_step + 1)
            super().on_train_begin(args, state, control, **kwargs)

    return ResumableTensorBoardCallback()
