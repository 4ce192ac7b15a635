"""Tasks of lm-evaluation-harness as their YAML files say, read without running or importing any of it.

A file is a task (`task: name`), a group of tasks (`group: name`, `task: [names]`) or a template for others (`include`);
`tag` puts a task under one more name. Files of a folder go before those that come with lm-eval.

A measure is named `task.metric`, as a gate writes it: `arc_easy.acc`, and with a named filter
`gsm8k.exact_match.strict_match`. What no Python name can hold becomes `_`.
"""

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mca_lib.errors import ConfigError

# Metrics of a task that names none (lm_eval.api.registry.DEFAULT_METRIC_REGISTRY, 0.4.13; a test compares).
DEFAULT_METRICS = {
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "multiple_choice": ("acc", "acc_norm"),
    "generate_until": ("exact_match",),
}


class Code(str):
    """What a `!function` tag names: Python that lm-eval imports."""


@dataclass(frozen=True)
class TaskFile:
    """A task or a group. `path` is its file; None for a task that is written within a group."""

    name: str
    config: Mapping[str, Any]
    path: Path | None
    local: bool
    """Of the user's folder, not of lm-eval."""
    members: tuple["TaskFile", ...] = ()

    @property
    def is_group(self) -> bool:
        return _is_group(self.config)

    def tasks(self) -> Iterator["TaskFile"]:
        """Itself, or the tasks of the group and of groups within it."""
        if not self.is_group:
            yield self
        for member in self.members:
            yield from member.tasks()

    def measures(self) -> Iterator[str]:
        """Names of what is measured."""
        for member in self.members:
            yield from member.measures()
        listed = "aggregate_metric_list" if self.is_group else "metric_list"
        metrics = _as_list(self.config.get(listed))
        if not self.is_group and self.config.get("metric_list") is None:
            metrics = [{"metric": m} for m in DEFAULT_METRICS[self.config.get("output_type", "generate_until")]]
        for metric in metrics:
            name = str(metric["metric"]).rpartition(".")[2]  # of a function, its own name
            for filter_name in _as_list(metric.get("filter_list")) or self._filters():
                yield measure_name(self.name, name, filter_name)

    def _filters(self) -> list[str]:
        if self.members:
            return sorted({name for task in self.tasks() for name in task._filters()})
        return [each["name"] for each in _as_list(self.config.get("filter_list"))] or ["none"]


def measure_name(task: str, metric: str, filter_name: str) -> str:
    """`task.metric`, with `.filter` unless that is lm-eval's `none`."""
    parts = [task, metric] if filter_name == "none" else [task, metric, filter_name]
    return ".".join(re.sub(r"\W", "_", part, flags=re.ASCII) for part in parts)


@dataclass(frozen=True)
class TaskLibrary:
    """The tasks of a folder, and behind them those of lm-eval."""

    folder: Path | None = None
    _files: dict[str, list[TaskFile]] = field(default_factory=dict)
    """Name or tag -> what has it in the folder."""

    @classmethod
    def open(cls, folder: Path | None) -> "TaskLibrary":
        """Raises ConfigError for a file that is no YAML, or a name that stands in two files."""
        library = cls(folder)
        for path in sorted(folder.rglob("*.yaml")) if folder else ():
            if any(part.startswith((".", "__pycache__")) for part in path.relative_to(folder).parts):
                continue
            library._add(read_task(path, within=folder), path)
        return library

    def _add(self, config: dict[str, Any], path: Path) -> None:
        name = _name(config)
        if not isinstance(name, str):
            return  # a template
        if any(other.name == name for other in self._files.get(name, ())):
            raise ConfigError(f"eval.task_path: {name!r} stands in {self._files[name][0].path} and in {path}")
        file = TaskFile(name, config, path, local=True)
        for key in (name, *_as_list(config.get("tag"))):
            self._files.setdefault(key, []).append(file)

    def find(self, name: str) -> list[TaskFile]:
        """The task, the group, or the tasks under the tag of this name, with the members of groups.

        Raises:
            ConfigError: there is no such task, or a group that holds itself.
        """
        return self._find(name, ())

    def _find(self, name: str, within: tuple[str, ...]) -> list[TaskFile]:
        if name in within:
            raise ConfigError(f"eval.tasks: the group {name} holds itself")
        found = self._files.get(name) or _of_package(name)
        if not found:
            where = f"in {self.folder} nor in lm-eval" if self.folder else "in lm-eval; is eval.task_path missing?"
            raise ConfigError(f"eval.tasks: {name!r} is no task, neither {where}")
        return [self._with_members(file, (*within, name)) for file in found]

    def _with_members(self, file: TaskFile, within: tuple[str, ...]) -> TaskFile:
        if not file.is_group:
            return file
        members: list[TaskFile] = []
        for item in _as_list(file.config.get("task")):
            members += self._members(item, file, within)
        return TaskFile(file.name, file.config, file.path, file.local, tuple(members))

    def _members(self, item: Any, group: TaskFile, within: tuple[str, ...]) -> list[TaskFile]:
        if isinstance(item, str):
            return self._find(item, within)
        name = item.get("group", item.get("task"))
        if self._files.get(name) or _of_package(name):
            changed = {key: value for key, value in item.items() if key not in ("task", "group")}
            return [
                TaskFile(f.name, {**f.config, **changed}, f.path, f.local, f.members) for f in self._find(name, within)
            ]
        inline = TaskFile(f"{group.name}::{name}", item, None, group.local)  # as lm-eval names it
        return [self._with_members(inline, (*within, name))]


def read_task(path: Path, within: Path | None = None, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A task file with what it includes; functions are `Code`, and stay unread.

    Args:
        within: the folder that an included file must lie in.

    Raises:
        ConfigError: the file cannot be read or is no YAML mapping, or includes itself or what lies elsewhere.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"eval.task_path: {path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        return {}  # of something else
    merged: dict[str, Any] = {}
    for included in _as_list(content.pop("include", None)):
        target = (path.parent / included).resolve()
        if within is not None and not target.is_relative_to(within.resolve()):
            raise ConfigError(
                f"eval.task_path: {path} includes {included}, which is outside of {within}; move it there"
            )
        if target in seen:
            raise ConfigError(f"eval.task_path: {path} includes itself by {included}")
        merged |= read_task(target, within, (*seen, path.resolve()))
    return merged | content


class _Loader(yaml.SafeLoader):
    """YAML's safe subset and lm-eval's tag for functions."""


_Loader.add_constructor("!function", lambda loader, node: Code(loader.construct_scalar(node)))


def package_folder() -> Path | None:
    """Where lm-eval is installed; None where it is not. Does not import it."""
    spec = importlib.util.find_spec("lm_eval")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def _of_package(name: str) -> list[TaskFile]:
    """What lm-eval has under a name."""
    files = [(path, read_task(path)) for path in _package_index().get(name, ())]
    return [TaskFile(_name(config), config, path, local=False) for path, config in files]


# Lines of a file that say what it is, with the items of a list below them.
_HEAD = re.compile(r"^[\"']?(task|group|tag|include|class)[\"']?:[ \t]*(.*(?:\n[ \t]*-[ \t].*)*)", re.MULTILINE)


@cache
def _package_index() -> Mapping[str, tuple[Path, ...]]:
    """Task, group or tag -> its files in lm-eval. Of fourteen thousand files, which take long to parse, only the lines
    that say so are looked at."""
    root = package_folder()
    index: dict[str, tuple[Path, ...]] = {}
    tagged: dict[str, list[Path]] = {}
    for path in sorted((root / "tasks").rglob("*.yaml")) if root else ():
        head = _head(path)
        is_group = "group" in head and "class" not in head
        for name in head.get("group" if is_group else "task", ())[:1]:
            index.setdefault(name, (path,))
            for tag in () if is_group else _tags(path):
                tagged.setdefault(tag, []).append(path)
    return {tag: tuple(paths) for tag, paths in tagged.items()} | index


@cache
def _head(path: Path) -> dict[str, list[str]]:
    if not path.is_file():
        return {}
    lines = _HEAD.findall(path.read_text(encoding="utf-8"))
    return {key: re.findall(r"[\w./][\w./:+()-]*", re.sub(r"#.*", "", value)) for key, value in lines}


def _tags(path: Path) -> list[str]:
    """Its own, else those of a file that it includes."""
    head = _head(path)
    if "tag" in head:
        return head["tag"]
    return [tag for each in head.get("include", ()) for tag in _tags(Path(os.path.normpath(path.parent / each)))]


def _is_group(config: Mapping[str, Any]) -> bool:
    return "group" in config and "class" not in config  # of a task in Python, `group` was a tag once


def _name(config: Mapping[str, Any]) -> Any:
    return config.get("group" if _is_group(config) else "task")


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
