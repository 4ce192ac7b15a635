"""The deployments of a recipe as data: what `mcaflow deploy` registers with a Prefect server.

    mcaflow/NAME               runs the recipe when somebody asks for it
    mcaflow/NAME-scheduled     with --cron: the same by the clock, never two at a time
    mcaflow-evaluate/NAME      with --evaluate-only: measures what is trained, and trains nothing
    mcaflow-watch/NAME         with --watch: starts mcaflow/NAME when the data or the model has changed

Workers import the flows as modules, so they need this package and no copy of the code. Paths of the recipe are made
absolute: a worker may have been started anywhere.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flows.recipe import PipelineConfig
from mca_lib.errors import ConfigError

POOL = "mcaflow"
HEARTBEAT_SECONDS = 60
_HEARTBEAT = "PREFECT_FLOWS_HEARTBEAT_FREQUENCY"

# Fields that name files or folders, as section.field; a value may be a list.
_PATHS = (
    "dataset.files",
    "dataset.eval_files",
    "dataset.dataset_dir",
    "dataset.media_dir",
    "eval.task_path",
    "promote.push_to",
    "store.path",
    "store.remote",
)

type Overlap = Literal["refuse", "queue"]


@dataclass(frozen=True)
class Timing:
    """When a recipe runs by itself, and what else is deployed of it."""

    cron: str | None = None
    timezone: str = "UTC"
    overlap: Overlap = "refuse"
    watch_seconds: float | None = None
    evaluate_only: bool = False


@dataclass(frozen=True)
class Deployment:
    """One deployment. `flow` is the module path of its flow; `wanted` is False for one that is to lose its schedule."""

    flow: str
    name: str
    description: str
    parameters: dict[str, Any] = field(default_factory=dict)
    cron: str | None = None
    timezone: str = "UTC"
    interval_seconds: float | None = None
    overlap: Overlap | None = None
    wanted: bool = True


def deployments_of(config: PipelineConfig, timing: Timing) -> list[Deployment]:
    """All deployments of a recipe, in an order in which they can be registered."""
    name, recipe = config.name, {"config": portable(config)}
    return [
        Deployment("flows.pipeline.pipeline", name, f"Run the recipe {name}.", recipe),
        Deployment(
            "flows.pipeline.pipeline",
            f"{name}-scheduled",
            f"Run the recipe {name} by the clock.",
            recipe,
            cron=timing.cron,
            timezone=timing.timezone,
            overlap=timing.overlap,
            wanted=timing.cron is not None,
        ),
        Deployment(
            "flows.evaluation.evaluate_only",
            name,
            f"Evaluate what the recipe {name} has trained; train nothing.",
            recipe,
            wanted=timing.evaluate_only,
        ),
        Deployment(
            "flows.watch.watch",
            name,
            f"Start mcaflow/{name} when its data or its model has changed.",
            recipe | {"deployment": f"mcaflow/{name}"},
            interval_seconds=timing.watch_seconds,
            overlap="refuse",
            wanted=timing.watch_seconds is not None,
        ),
    ]


def portable(config: PipelineConfig) -> dict[str, Any]:
    """The fields that the recipe gives, as JSON, with paths that mean the same in every working directory.

    No key changes: where a file lies is part of none, and an indexed corpus enters by its absolute path anyway.
    """
    content = config.model_dump(mode="json", exclude_unset=True)
    for dotted in _PATHS:
        section, name = dotted.split(".")
        # A section that the recipe leaves out has defaults, of which the store's is a relative path.
        value = getattr(getattr(config, section), name, None)
        if value:
            content.setdefault(section, {})[name] = _absolute(value)
    model = config.model
    if model.source == "local" or (model.source == "auto" and Path(model.name_or_path).expanduser().is_dir()):
        content["model"]["name_or_path"] = _absolute(model.name_or_path)
    return content


def heartbeat_seconds() -> int:
    """Between two signs of life of a run; `flows.automations` waits for several of them.

    The environment may say otherwise, 30 at least; then it must for the server and for who deploys.
    """
    given = os.environ.get(_HEARTBEAT, str(HEARTBEAT_SECONDS))
    if not given.isdecimal() or int(given) < 30:
        raise ConfigError(f"{_HEARTBEAT}: {given!r} is no number of seconds; 30 is the least")
    return int(given)


def job_variables(config: PipelineConfig) -> dict[str, Any]:
    """What a worker gives to a run beside its own environment."""
    return {
        "env": {
            # A server that is away for half an hour must not fail a training that took days.
            "PREFECT_CLIENT_MAX_RETRIES": "10",
            _HEARTBEAT: str(heartbeat_seconds()),
            # Not below PREFECT_HOME by itself (Prefect 3.9, issue 23046).
            "PREFECT_RESULTS_LOCAL_STORAGE_PATH": os.path.join(_absolute(config.store.path), ".prefect-results"),
            "DO_NOT_TRACK": "1",
        }
    }


def _absolute[T: (str, list[str])](value: T) -> T:
    if isinstance(value, list):
        return [_absolute(item) for item in value]
    return value if "://" in value else os.path.abspath(os.path.expanduser(value))
