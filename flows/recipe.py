"""The recipe: one YAML file, one pydantic model, one form in the Prefect UI.

``PipelineConfig`` is checked as a whole when it is built, so that a contradiction between two fields is found before
anything runs. Errors name the field by its dotted path and fit on one line.
"""

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from mca_lib.errors import ConfigError
from mca_lib.models.hybrid.pattern import MAMBA
from tasks.checkpoint_config import CheckpointConfig, checkpoint_problems
from tasks.dataset import DatasetConfig
from tasks.download import ModelConfig
from tasks.evaluate import EvalConfig, eval_problems
from tasks.export import ExportConfig
from tasks.launchers.check import launcher_problems
from tasks.promote import PromoteConfig, promotion_problems
from tasks.remote import url_problem
from tasks.section import Execution, Section
from tasks.store import ArtifactStore
from tasks.training_config import (
    DpoConfig,
    LauncherConfig,
    LoraConfig,
    ParallelConfig,
    TrainingConfig,
)
from tasks.training_problems import preference_problems, training_problems


class StoreConfig(Section):
    """Where artifacts live."""

    path: Execution[str] = Field(default=".mcaflow/store", min_length=1)
    """Folder of the artifact store; shared by every run that should reuse the other's work."""
    remote: Execution[str | None] = None
    """URL of a second store that machines share, for instance `s3://bucket/mcaflow`: what it has is fetched, what is
    computed is brought there. Credentials come from the environment."""

    def open(self) -> ArtifactStore:
        """Raises StoreError where it cannot be used."""
        return ArtifactStore(self.path, remote=self.remote)


class PipelineConfig(Section):
    """A whole run: from a Hugging Face model and a data set to a fine-tuned, evaluated Hugging Face model."""

    name: Execution[str] = Field(default="mcaflow", min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][\w.-]*$")
    """Name of the run in the Prefect UI, where it replaces the form's Run Name; part of no key."""
    model: ModelConfig
    dataset: DatasetConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()
    training: TrainingConfig = TrainingConfig()
    lora: LoraConfig = LoraConfig()
    dpo: DpoConfig = DpoConfig()
    export: ExportConfig = ExportConfig()
    eval: EvalConfig = EvalConfig()
    launcher: LauncherConfig = LauncherConfig()
    promote: PromoteConfig = PromoteConfig()
    store: StoreConfig = StoreConfig()

    @model_validator(mode="before")
    @classmethod
    def _empty_sections_are_defaults(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        return {name: value for name, value in content.items() if value is not None or name not in cls.model_fields}

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        for problem in _contradictions(self):
            raise ValueError(problem)
        return self


def _contradictions(config: PipelineConfig) -> Iterator[str]:
    """Contradictions between fields, each as `field: what is wrong and what to do`."""
    dataset, training = config.dataset, config.training
    if bool(dataset.files) == bool(dataset.names):
        given = "both are given" if dataset.files else "neither is given"
        yield f"dataset.files: name data files there, or entries of dataset_info.json in dataset.names; {given}"
    if dataset.names and dataset.dataset_dir is None:
        yield "dataset.dataset_dir: required with dataset.names; the folder that holds dataset_info.json"
    if training.stage != "pt" and dataset.template is None:
        yield f"dataset.template: required for training.stage {training.stage}; the chat template's name, e.g. qwen"
    if training.stage != "pt" and dataset.files and dataset.formatting == "text":
        yield "dataset.formatting: text has no answers to learn; use training.stage pt, or alpaca or sharegpt rows"
    if training.stage == "dpo" and dataset.files and not dataset.ranking:
        yield "dataset.ranking: training.stage dpo needs rows with a chosen and a rejected answer; set true, or use sft"
    if training.stage != "dpo" and dataset.ranking:
        yield f"dataset.ranking: rows with two answers are for training.stage dpo, not {training.stage}"
    if training.stage == "dpo" and dataset.train_on_prompt:
        yield "dataset.train_on_prompt: pairs are compared by their answers alone; use false"
    if training.max_steps == 0:
        yield "training.max_steps: 0 steps train nothing; use -1 to derive them from training.num_train_epochs"
    if training.min_learning_rate > training.learning_rate:
        yield "training.min_learning_rate: greater than training.learning_rate"
    if config.store.remote is not None and (problem := url_problem(config.store.remote)):
        yield f"store.remote: {problem}"
    yield from checkpoint_problems(config.checkpoint)
    yield from launcher_problems(config.launcher)
    yield from training_problems(training, config.parallel, config.launcher)
    yield from preference_problems(training, config.dpo)
    if training.finetuning_type == "lora" and MAMBA in (config.checkpoint.pattern or ""):
        yield (
            "training.finetuning_type: lora would leave the fresh Mamba layers of checkpoint.pattern untrained, which "
            "have no adapters; use full, with training.freeze: [transformer] to train them alone"
        )
    held_out = bool(dataset.eval_files) or dataset.eval_fraction > 0
    yield from eval_problems(config.eval)
    yield from promotion_problems(
        config.promote, pairs=training.stage == "dpo", held_out=held_out, tasks=bool(config.eval.tasks)
    )
    if training.eval_steps and not held_out:
        yield "training.eval_steps: no rows are held out; set dataset.eval_fraction or dataset.eval_files, or use 0"


class _UniqueKeys(yaml.SafeLoader):
    """YAML's safe subset, in which a key that stands twice in one mapping is an error, not a silent replacement."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.YAMLError(
                f"{twice!r} stands twice in the mapping that starts in line {node.start_mark.line + 1}"
            )
        return super().construct_mapping(node, deep)


def load_recipe(path: Path | str, overrides: list[str] | None = None) -> PipelineConfig:
    """Read a YAML recipe and apply overrides such as ``training.learning_rate=1e-5``.

    Raises:
        ConfigError: the file is missing or no YAML mapping, an override is malformed, or a field is wrong.
    """
    content = read_recipe(path)
    for override in overrides or []:
        _apply_override(content, override)
    try:
        return PipelineConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"recipe {path}: {describe(error)}") from None


def read_recipe(path: Path | str) -> dict[str, Any]:
    """The sections of a YAML recipe as they stand there, whatever is in them.

    Raises:
        ConfigError: the file is missing or no YAML mapping.
    """
    path = Path(path)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except FileNotFoundError:
        raise ConfigError(f"recipe {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe {path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"recipe {path}: expected a mapping of sections, found {type(content).__name__}")
    return content


def _apply_override(content: dict[str, Any], override: str) -> None:
    dotted, separator, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(f"--set {override}: expected section.field=value")
    try:
        value = yaml.load(text, _UniqueKeys)
    except yaml.YAMLError:
        raise ConfigError(f"--set {override}: the value is not valid YAML; quote it") from None
    parent = content
    for depth, key in enumerate(keys[:-1], start=1):
        if parent.get(key) is None:
            parent[key] = {}
        parent = parent[key]
        if not isinstance(parent, dict):
            raise ConfigError(f"--set {override}: {'.'.join(keys[:depth])} is not a section")
    parent[keys[-1]] = value


def describe(error: ValidationError) -> str:
    """A pydantic error on one line: each wrong field by its dotted path, unknown ones with the nearest name."""
    return "; ".join(_describe_one(item) for item in error.errors())


def _describe_one(item: dict[str, Any]) -> str:
    path = ".".join(str(part) for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        known = _fields_at(item["loc"][:-1])
        near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
        return f"{path}: unknown field; {f'did you mean {near[0]}?' if near else 'known are ' + ', '.join(known)}"
    if not path:
        return message
    given = item.get("input")
    shown = f" (given: {given!r})" if isinstance(given, str | int | float | bool) and not _secret(path) else ""
    return f"{path}: {message[:1].lower()}{message[1:]}{shown}"


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = PipelineConfig
    for part in location:
        annotation = model.model_fields[str(part)].annotation if str(part) in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def _secret(path: str) -> bool:
    return any(word in path.lower() for word in ("token", "password", "secret", "key"))
