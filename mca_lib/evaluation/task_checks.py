"""What can be known to be wrong with tasks of lm-evaluation-harness, before anything runs and without running them.

Task files are code in several ways, which lm-eval runs without asking: functions that they name, metrics that it does
not know and fetches from a hub as Python, data in pickles, and answers of models that a task executes. Of a user's own
folder none is admitted unless the recipe says so; what comes with lm-eval is as trusted as the rest of the package, but
for tasks that execute what a model writes.
"""

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mca_lib.errors import ConfigError
from mca_lib.evaluation.task_files import DEFAULT_METRICS, Code, TaskFile, TaskLibrary, package_folder

LOCAL_FORMATS = ("json", "csv", "parquet", "text", "arrow")
"""Readers of `datasets` for files: plain data, nothing that is unpickled."""
_TRUST = "read it, and set eval.trust_task_code: true, or leave the task out"
_HUB_SECONDS = 10.0


def find_tasks(names: Sequence[str], folder: str | None, *, trusted: bool) -> list[TaskFile]:
    """The tasks and groups of a recipe, checked.

    Args:
        folder: the user's task files with their data.
        trusted: Python that they bring may run, and so may what models write.

    Raises:
        ConfigError: lm-eval is not installed, there is no such task, a file of one is malformed, data are missing, or
            code is not trusted.
    """
    if package_folder() is None:
        raise ConfigError("eval.tasks: the package lm-eval is not installed; install mcaflow[eval], or name no tasks")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"eval.tasks: {twice[0]!r} stands there twice")
    root = Path(folder).expanduser() if folder else None
    if root is not None and not root.is_dir():
        raise ConfigError(f"eval.task_path: {root} is no folder; it holds the YAML files of tasks and their data")
    library = TaskLibrary.open(root)
    found = [file for name in names for file in library.find(name)]
    for task in _leaves(found):
        _check_form(task)
        if not trusted:
            for what in _code(task):
                raise ConfigError(f"eval.tasks: {task.name}{_where(task)} {what}; {_TRUST}")
        if task.local and root is not None:
            _check_data(task, root)
    return found


def measures(tasks: Sequence[TaskFile]) -> set[str]:
    """Names of what these tasks measure, as a gate writes them."""
    return {name for task in tasks for name in task.measures()}


def hub_datasets(tasks: Sequence[TaskFile]) -> set[str]:
    """Repositories of a hub that hold the tasks' data."""
    paths = {task.config.get("dataset_path") for task in _leaves(tasks) if not task.config.get("custom_dataset")}
    return {path for path in paths if isinstance(path, str) and path not in LOCAL_FORMATS}


def check_hub(datasets: set[str], endpoint: str | None = None) -> None:
    """Raises ConfigError for a repository that cannot be reached and is not in the cache of `datasets` either."""
    missing = sorted(name for name in datasets if not _is_cached(name))
    if missing and (variable := _offline()):
        raise ConfigError(f"eval.tasks: {missing[0]} is on a hub, and {variable} forbids to fetch it; {_LOCAL}")
    for name in missing:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        try:
            HfApi(endpoint).dataset_info(name, timeout=_HUB_SECONDS)
        except HfHubHTTPError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"eval.tasks: the data set {name} cannot be fetched: {reason:.200}; {_LOCAL}") from None
        except Exception as error:  # of httpx, of any depth
            raise ConfigError(
                f"eval.tasks: {name} is on a hub that does not answer ({type(error).__name__}); {_LOCAL}"
            ) from None


def check_engine(engine: str) -> None:
    """Raises ConfigError where vLLM is asked for and not installed."""
    if engine == "vllm" and not has_vllm():
        raise ConfigError("eval.engine: the package vllm is not installed; install it, or use transformers")


def has_vllm() -> bool:
    """Whether vLLM is installed; does not import it."""
    return importlib.util.find_spec("vllm") is not None


_LOCAL = "fetch it once where there is a network, or use tasks of eval.task_path with data of their own"


def _leaves(files: Sequence[TaskFile]) -> Iterator[TaskFile]:
    for file in files:
        yield from file.tasks()


def _where(task: TaskFile) -> str:
    return f" ({task.path})" if task.path else ""


def _code(task: TaskFile) -> Iterator[str]:
    """What in the task would run code that comes neither with mcaflow nor with lm-eval."""
    if task.config.get("unsafe_code"):
        yield "executes what the model writes"
    if not task.local:
        return
    for field, value in _flat(task.config):
        if isinstance(value, Code):
            yield f"runs the function {value} for {field}"
    if "class" in task.config:
        yield f"is a Python class, {task.config['class']}"
    if "use_prompt" in task.config:
        yield "takes its prompt from elsewhere by use_prompt"
    for metric in task.config.get("metric_list") or ():
        if metric.get("hf_evaluate") or metric["metric"] not in _known_metrics():
            yield f"has the metric {metric['metric']}, which lm-eval would fetch from a hub and run"
    path = task.config.get("dataset_path")
    if isinstance(path, str) and path not in LOCAL_FORMATS and "/" not in path:
        yield f"has its data in the format {path}, which is none of {', '.join(LOCAL_FORMATS)}"


def _check_form(task: TaskFile) -> None:
    kind, metrics = task.config.get("output_type", "generate_until"), task.config.get("metric_list") or []
    if "class" not in task.config and kind not in DEFAULT_METRICS:
        raise ConfigError(
            f"eval.tasks: {task.name}{_where(task)}: output_type {kind} is none of {', '.join(DEFAULT_METRICS)}"
        )
    if not isinstance(metrics, list) or not all(isinstance(each, dict) and "metric" in each for each in metrics):
        raise ConfigError(f"eval.tasks: {task.name}{_where(task)}: metric_list is no list of `metric: name`")


def _flat(value: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{field}.{key}" if field else str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _flat(item, field)
    else:
        yield field, value


def _known_metrics() -> set[str]:
    """By the source of lm-eval, which is not imported here."""
    folder = package_folder()
    assert folder is not None
    return set(re.findall(r'^    metric="(\w[^"]*)"', (folder / "api" / "metrics.py").read_text("utf-8"), re.MULTILINE))


def _check_data(task: TaskFile, root: Path) -> None:
    """Data of local files must lie in the folder: its digest is in the key of the evaluation, and nothing else's."""
    path = task.config.get("dataset_path")
    if path not in LOCAL_FORMATS:
        if isinstance(path, str) and (path.startswith((".", "/", "~")) or (root / path).exists()):
            raise ConfigError(
                f"eval.tasks: {task.name}{_where(task)}: dataset_path {path} is a path; give the format, one of "
                f"{', '.join(LOCAL_FORMATS)}, and the files in dataset_kwargs.data_files"
            )
        return
    given = (task.config.get("dataset_kwargs") or {}).get("data_files")
    for _, name in _flat(given):
        if not isinstance(name, str):
            raise ConfigError(f"eval.tasks: {task.name}{_where(task)} names no dataset_kwargs.data_files")
        path = (root / name).resolve()
        if not path.is_relative_to(root.resolve()):
            raise ConfigError(
                f"eval.tasks: {task.name}: {name} lies outside of {root}; move it there, and name it from there"
            )
        if not path.is_file():
            raise ConfigError(
                f"eval.tasks: {task.name}: {path} does not exist; paths of data_files start at eval.task_path"
            )


def _is_cached(name: str) -> bool:
    home = os.environ.get("HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
    cache = Path(os.environ.get("HF_DATASETS_CACHE", os.path.join(home, "datasets"))).expanduser()
    return (cache / name.replace("/", "___")).is_dir()


def _offline() -> str | None:
    """The variable that forbids to ask a hub."""
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    return next((name for name in names if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")), None)
