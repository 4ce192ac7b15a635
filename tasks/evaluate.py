"""Stage *evaluate*: the base model and the trained one on held-out rows.

metrics.json     loss, perplexity, accuracy per model, and their difference with its standard error; tasks
samples.jsonl    what both models answer to the same prompts
report.md        both, as tables
report.html      the same with curves, data and lineage: one file that needs nothing else
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from mca_lib.evaluation.page import html_page
from mca_lib.evaluation.task_checks import check_engine, check_hub, find_tasks, has_vllm, hub_datasets, measures
from tasks.canonical import JSON
from tasks.contract import Input, Produced, Stage, StageContext
from tasks.evaluation_page import report_of
from tasks.report import Reporter
from tasks.section import Execution, Section
from tasks.store import Artifact, ArtifactStore


class EvalConfig(Section):
    """What is measured at the end."""

    max_rows: PositiveInt | None = None
    """Held-out rows to use; null for all."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation, for both models."""
    prompts: list[str] = Field(default_factory=list)
    """Prompts of the sample generations; without any, the first held-out prompts."""
    num_samples: int = Field(default=3, ge=0, le=100)
    """Held-out prompts to generate from; without effect when `prompts` are given."""
    max_new_tokens: PositiveInt = 48
    """Longest sample generation, in tokens."""
    batch_size: Execution[PositiveInt | Literal["auto"]] = 4
    """Rows per forward pass; auto: the most that fit into the memory."""
    tasks: list[str] = Field(default_factory=list)
    """Tasks, groups or tags of lm-evaluation-harness, measured of both models; needs the extra `eval`."""
    task_path: Execution[str | None] = None
    """Folder of task files of your own with their data, which go before lm-eval's; the digest of what is in it is part
    of the key."""
    trust_task_code: Execution[bool] = False
    """Run Python that task files of `task_path` bring, and programs that models write where a task runs them."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Examples before each question of a task; null: as the task says."""
    limit: PositiveInt | None = None
    """Documents of each task; null for all."""
    chat_template: bool = False
    """Put the questions of tasks through the chat template."""
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    """What runs the tasks; auto: vLLM where it is installed. Not run here with vLLM."""

    def identity(self) -> dict[str, Any]:
        """Without tasks, nothing about them."""
        fields = super().identity()
        return fields if self.tasks else {name: value for name, value in fields.items() if name not in _OF_TASKS}

    def with_engine(self) -> "EvalConfig":
        """With the engine that `auto` is here: figures of one differ from those of another by rounding."""
        engine = ("vllm" if has_vllm() else "transformers") if self.engine == "auto" else self.engine
        return self.model_copy(update={"engine": engine})


_OF_TASKS = ("tasks", "num_fewshot", "limit", "chat_template", "engine")


def eval_problems(config: EvalConfig) -> Iterator[str]:
    """Contradictions within the section, as `field: what is wrong and what to do`."""
    for name in ("task_path", "trust_task_code", "num_fewshot", "limit", "chat_template"):
        if not config.tasks and getattr(config, name) != EvalConfig.model_fields[name].default:
            yield f"eval.{name}: without effect, since there are no tasks; name them in eval.tasks"


def check_tasks(config: EvalConfig) -> set[str]:
    """What the tasks measure. Runs nothing of them.

    Raises ConfigError for lm-eval or vLLM that is not installed, an unknown task, or code that is not trusted.
    """
    check_engine(config.engine)
    return measures(_tasks(config)) if config.tasks else set()


def check_task_data(config: EvalConfig) -> None:
    """Raises ConfigError for a task whose data are on a hub that cannot be reached. Asks the hub."""
    if config.tasks:
        check_hub(hub_datasets(_tasks(config)))


def _tasks(config: EvalConfig) -> list[Any]:
    return find_tasks(config.tasks, config.task_path, trusted=config.trust_task_code)


# Waiting OpenMP threads otherwise spin: measured 3 times slower where other processes use the same cores.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class EvaluateStage(Stage):
    """Measure `base` and `trained`, two Hugging Face directories, on the eval split of `dataset`."""

    base: Artifact
    trained: Artifact
    dataset: Artifact
    config: EvalConfig
    task_files: dict[str, str] = field(default_factory=dict)
    """Digest of each file of `config.task_path`. Set by `resolve`."""

    name: ClassVar[str] = "evaluate"
    version: ClassVar[int] = 1

    def resolve(self, store: ArtifactStore, report: Reporter) -> "EvaluateStage":
        """Look at the task files. Raises ConfigError for tasks that cannot be run, DataError for an unreadable file."""
        if not self.config.tasks:
            return self
        check_tasks(self.config)
        root = Path(self.config.task_path).expanduser() if self.config.task_path else None
        files = (
            {path.relative_to(root).as_posix(): store.statcache.digest(path) for path in _files(root)} if root else {}
        )
        return replace(self, config=self.config.with_engine(), task_files=files)

    def identity(self) -> dict[str, JSON]:
        if not self.config.tasks:
            return self.config.identity()
        return self.config.identity() | {"task_files": self.task_files, "lm_eval": version("lm-eval")}

    def inputs(self) -> dict[str, Input]:
        # Without held-out rows there is no such part, and the template's stop tokens are all that matters.
        part = "eval" if "eval" in self.dataset.parts else None
        return {
            "base": Input.of(self.base),
            "trained": Input.of(self.trained),
            "dataset": Input.of(self.dataset, part),
        }

    def produce(self, ctx: StageContext) -> Produced:
        config = self.config
        tasks = {
            "names": config.tasks,
            "folder": config.task_path,
            "trusted": config.trust_task_code,
            "num_fewshot": config.num_fewshot,
            "limit": config.limit,
            "chat_template": config.chat_template,
            "engine": config.engine,
        }
        spec = {name: getattr(config, name) for name in _OF_ROWS} | {
            "models": {"base": str(self.base.path), "trained": str(self.trained.path)},
            "token_store": str(self.dataset.path / "eval"),
            "tokenizer_dir": str(self.trained.path),
            "output": str(ctx.staging),
            "tasks": tasks if config.tasks else None,
        }
        secrets = ("HF_TOKEN",) if config.tasks else ()  # data of tasks may be gated
        metrics = ctx.run_job("evaluate", spec, env=ENVIRONMENT, secrets=secrets)
        inputs = {"base": self.base, "trained": self.trained, "dataset": self.dataset}
        report = report_of(ctx.store, inputs, metrics, read_samples(ctx.staging))
        (ctx.staging / "report.html").write_text(html_page(report), encoding="utf-8")
        return Produced(stats=metrics)


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """What the models answered, of an evaluation's directory."""
    # Not `splitlines`: U+2028 and the like stand in texts as they are.
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").split("\n") if line]


_OF_ROWS = ("max_rows", "dtype", "prompts", "num_samples", "max_new_tokens", "batch_size")


def _files(root: Path) -> Iterator[Path]:
    """All files below a folder, but hidden ones and compiled Python."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))
