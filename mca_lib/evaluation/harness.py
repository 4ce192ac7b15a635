"""Tasks of lm-evaluation-harness on a model that is loaded already.

Figures are lm-eval's own, with its seeds, filters and standard errors. Ours are the model, which is loaded as for all
other figures, and that nothing in a published generation config (sampling, penalties) has a say in greedy answers.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mca_lib.errors import ConfigError, ModelError
from mca_lib.evaluation.task_checks import find_tasks
from mca_lib.evaluation.task_files import TaskFile, measure_name

type Figures = dict[str, dict[str, Any]]
"""Measure -> {"value", "stderr" (None: there is none), "documents"}."""


@dataclass(frozen=True)
class TaskSpec:
    """Which tasks, and how."""

    names: list[str]
    folder: str | None = None
    """The user's own task files; paths of their data start there."""
    trusted: bool = False
    """Python that they bring may run."""
    num_fewshot: int | None = None
    limit: int | None = None
    """Documents of each task; None for all."""
    chat_template: bool = False
    engine: Literal["transformers", "vllm"] = "transformers"


def run_tasks(spec: TaskSpec, model: Any, tokenizer: Any, batch_size: int) -> Figures:
    """What transformers' `model` makes of the tasks.

    Raises:
        ConfigError: a task that lm-eval cannot load, for instance because its template names a field that is not there.
    """
    from lm_eval.models.huggingface import HFLM

    model.generation_config = _greedy(model, tokenizer)
    return _evaluate(spec, HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size))


def run_tasks_with_vllm(spec: TaskSpec, directory: str, tokenizer_dir: str, dtype: str) -> Figures:
    """The same by vLLM, which loads the directory itself and finds a batch size that fits. Not run here."""
    from lm_eval.models.vllm_causallms import VLLM

    model = VLLM(pretrained=directory, tokenizer=tokenizer_dir, dtype=dtype, batch_size="auto", trust_remote_code=False)
    return _evaluate(spec, model)


def _greedy(model: Any, tokenizer: Any) -> Any:
    from transformers import GenerationConfig

    from mca_lib.evaluation.samples import end_of_text_ids

    return GenerationConfig(do_sample=False, eos_token_id=sorted(end_of_text_ids(model, tokenizer)) or None)


def _evaluate(spec: TaskSpec, model: Any) -> Figures:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = find_tasks(spec.names, spec.folder, trusted=spec.trusted)
    folder = Path(spec.folder).expanduser().resolve() if spec.folder else None
    # Its own tasks are fourteen thousand files to parse.
    own = any(not task.local for file in found for task in file.tasks())
    with contextlib.chdir(folder or "."), contextlib.nullcontext() if spec.trusted else sandboxed_templates():
        manager = TaskManager(include_path=str(folder) if folder else None, include_defaults=own)
        _load(manager, spec.names)
        results = simple_evaluate(
            model=model,
            tasks=list(spec.names),
            task_manager=manager,
            num_fewshot=spec.num_fewshot,
            limit=spec.limit,
            apply_chat_template=spec.chat_template,
            confirm_run_unsafe_code=spec.trusted,
            log_samples=False,
        )
    return _figures(results["results"], found)


def _load(manager: Any, names: list[str]) -> None:
    """Data are read and the first document is rendered here, so what is wrong with a task is said here."""
    for name in names:
        try:
            manager.load([name])
        except Exception as error:  # of any type: jinja's, those of datasets, those of the hub
            detail = " ".join(str(error).split())
            raise ConfigError(
                f"eval.tasks: lm-eval cannot load {name}: {type(error).__name__}: {detail:.300}"
            ) from error


def _figures(results: dict[str, dict[str, Any]], found: list[TaskFile]) -> Figures:
    """Of lm-eval's `{"arc_easy": {"acc,none": 0.3, "acc_stderr,none": 0.1, "sample_len": 20, ...}}`."""
    figures: Figures = {}
    for task, measured in results.items():
        for key, value in measured.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            stderr = measured.get(f"{metric}_stderr,{filter_name}")
            if isinstance(value, float | int) and not math.isfinite(value):
                raise ModelError(f"{task}: {metric} is {value}: the model's weights or activations overflow")
            figures[measure_name(task, metric, filter_name)] = {
                "value": float(value),
                "stderr": float(stderr) if isinstance(stderr, float | int) and math.isfinite(stderr) else None,
                "documents": measured.get("sample_len"),
            }
    return figures


@contextlib.contextmanager
def sandboxed_templates() -> Iterator[None]:
    """Let lm-eval render prompts in jinja's sandbox.

    Templates of task files are rendered by a plain environment (lm_eval.utils.env, 0.4.13), in which
    ``{{ x.__class__.__mro__ }}`` and so on reach any function of Python. A test tells when that is no longer so.
    """
    import lm_eval.utils
    from jinja2.sandbox import SandboxedEnvironment

    plain = lm_eval.utils.env
    sandbox = SandboxedEnvironment(loader=plain.loader, undefined=plain.undefined, keep_trailing_newline=True)
    sandbox.filters = plain.filters
    lm_eval.utils.env = sandbox
    try:
        yield
    finally:
        lm_eval.utils.env = plain
