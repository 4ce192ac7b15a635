"""The job `evaluate`: models side by side on held-out documents.

Result, and content of metrics.json:

    {"documents": 46, "tokens": 612, "note": "",
     "models": {"base": {"loss": 6.88, "perplexity": 972.6, "accuracy": 0.0, "tokens": 612}, "trained": {...}},
     "difference": {"loss": -6.8, "loss_stderr": 0.04, "accuracy": 0.99}}

Where the data set holds pairs of answers, these are figures of the chosen ones, and `preference` compares both:

    {"pairs": 46, "likelier": {"base": 0.5, "trained": 0.9}, "reward_accuracy": 0.95, "reward_margin": 4.1,
     "reward_margin_stderr": 0.3}        (mca_lib/evaluation/preference.py)

With tasks of lm-evaluation-harness, `tasks` has what they measure (mca_lib/evaluation/harness.py):

    {"arc_easy.acc": {"base": {"value": 0.25, "stderr": 0.01, "documents": 2376}, "trained": {...}}}

Without held-out rows `documents` is 0, `note` says so, `models` and `difference` are empty, and samples come from
`prompts` alone. A line of samples.jsonl: {"prompt": ..., "reference": ..., "answers": {"base": ..., "trained": ...}}.
"""

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from mca_lib.adapters.peft_files import is_adapter
from mca_lib.converter.remote_files import admit_own_code
from mca_lib.data.token_store import TokenStore
from mca_lib.errors import ConfigError, ModelError
from mca_lib.evaluation.batch_size import fitting
from mca_lib.evaluation.harness import Figures, TaskSpec, run_tasks, run_tasks_with_vllm
from mca_lib.evaluation.images import Pictures
from mca_lib.evaluation.preference import pair_figures
from mca_lib.evaluation.report import markdown
from mca_lib.evaluation.samples import Prompt, answer, held_out_prompts, recipe_prompts
from mca_lib.evaluation.scoring import Document, Scores, loss_difference, score
from mca_lib.models.config import read_json
from mca_lib.models.transformers_class import auto_class
from mca_lib.models.vocabulary import grow_transformers
from mca_lib.tokenizer import load_tokenizer

NO_ROWS = "no held-out rows"


@dataclass(frozen=True)
class EvaluateSpec:
    """What the job is asked to do."""

    models: dict[str, str]
    """Name -> Hugging Face directory. Changes are of the last against the first."""
    token_store: str
    """Directory of the eval split; where there is none, nothing was held out. Its parent holds meta.json."""
    tokenizer_dir: str
    """Tokenizer and chat template of all models."""
    max_rows: int | None
    """Held-out documents or pairs to use; None for all."""
    dtype: Literal["float32", "bfloat16"]
    """Of the computation."""
    prompts: list[str]
    """Prompts of the sample generations; without any, the first held-out ones."""
    num_samples: int
    """How many held-out prompts."""
    max_new_tokens: int
    batch_size: int | Literal["auto"]
    """Documents per forward pass; auto: the most that fit."""
    output: str
    """Directory for metrics.json, samples.jsonl and report.md."""
    tasks: dict[str, Any] | None = None
    """Fields of `TaskSpec`: tasks of lm-evaluation-harness, if there are any."""


def evaluate(spec: dict[str, Any], progress: Callable[..., None]) -> dict[str, Any]:
    """Run the job; `spec` holds the fields of `EvaluateSpec`, the result is described in the module's docstring.

    Raises:
        ModelError: a directory holds no complete safetensors model, does not fit the tokens, or yields NaN.
        ConfigError: a prompt has no tokens, or is longer than the model's positions.
    """
    job = EvaluateSpec(**spec)
    pairs = holds_pairs(job.token_store)
    documents = read_documents(job.token_store, job.max_rows and job.max_rows * (2 if pairs else 1))
    chosen = slice(None, None, 2 if pairs else 1)
    tokenizer = load_tokenizer(job.tokenizer_dir)
    if job.prompts:
        prompts = recipe_prompts(job.prompts, tokenizer)
    else:
        prompts = held_out_prompts(documents[chosen], tokenizer, job.num_samples)

    tasks = TaskSpec(**job.tasks) if job.tasks else None
    if tasks and tasks.engine == "vllm" and (adapters := [d for d in job.models.values() if is_adapter(d)]):
        raise ConfigError(f"eval.engine: vllm runs whole models, {adapters[0]} is an adapter; use transformers")
    per_model = len(documents) + len(prompts) + bool(tasks)
    found: dict[str, _Found] = {}
    for index, (name, directory) in enumerate(job.models.items()):

        def report(done: int, *, before: int = index * per_model, name: str = name) -> None:
            progress(before + done, len(job.models) * per_model, model=name)

        found[name] = _examine(name, directory, documents, prompts, tokenizer, job, tasks, report)
        gc.collect()
        if tasks and tasks.engine == "vllm":
            figures = run_tasks_with_vllm(tasks, directory, job.tokenizer_dir, job.dtype)
            found[name] = replace(found[name], tasks=figures)

    scores = {name: each.scores for name, each in found.items()}
    metrics = _metrics({name: s.part(chosen) for name, s in scores.items()} if documents else {})
    if pairs and documents:
        metrics["preference"] = pair_figures(scores)
    if tasks:
        names = next(iter(found.values())).tasks
        metrics["tasks"] = {each: {model: found[model].tasks[each] for model in found} for each in names}
    samples = [
        {
            "prompt": prompt.text,
            "reference": prompt.reference,
            "answers": {name: found[name].answers[i] for name in found},
        }
        for i, prompt in enumerate(prompts)
    ]
    _write(Path(job.output), metrics, samples)
    return metrics


def read_documents(directory: str | Path, max_rows: int | None) -> list[Document]:
    """The first `max_rows` documents of the eval split that have a loss token; none where there is no split."""
    if not Path(directory).is_dir():
        return []
    store = TokenStore.open(directory)
    pictures = Pictures(store)
    documents: list[Document] = []
    for index in range(store.num_documents):
        if max_rows is not None and len(documents) == max_rows:
            break
        tokens_S, loss_mask_S = store.document(index)
        if loss_mask_S.any():
            documents.append(Document(tokens_S.astype(np.int64), loss_mask_S, pictures.of(index)))
    return documents


def holds_pairs(directory: str | Path) -> bool:
    """Whether the documents of the split are chosen and rejected answers in turns."""
    return _read_meta(directory).get("objective") == "dpo"


def read_stop_ids(directory: str | Path) -> list[int]:
    """Tokens that end an answer in the data set whose split is `directory`, from its meta.json."""
    return _read_meta(directory)["stop_token_ids"]


def _read_meta(directory: str | Path) -> dict[str, Any]:
    return json.loads((Path(directory).parent / "meta.json").read_text(encoding="utf-8"))


def load_model(directory: str | Path, dtype: str, base: str | Path | None = None) -> torch.nn.Module:
    """A causal language model in evaluation mode, from safetensors files alone, on the GPU where there is one.

    Args:
        base: the model of a PEFT adapter directory, into which the adapter is merged.

    Raises:
        ModelError: there is no such model, a weight is missing, which transformers would fill with random numbers, or
            it brings code that is not what an export writes.
    """
    from safetensors import SafetensorError

    if base is not None and is_adapter(directory):
        from peft import PeftModel

        return PeftModel.from_pretrained(load_model(base, dtype), str(directory)).merge_and_unload().eval()
    if not (Path(directory) / "config.json").is_file():
        raise ModelError(f"{directory}: no config.json; expected a Hugging Face model directory")
    admit_own_code(directory)
    try:
        model, loading = auto_class(directory).from_pretrained(
            directory,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{directory}: transformers cannot load it: {' '.join(str(error).split())}") from error
    if missing := sorted(loading["missing_keys"]):
        raise ModelError(f"{directory}: {len(missing)} weights are missing, first {missing[0]}")
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


@dataclass(frozen=True)
class _Found:
    """What one model made of it all."""

    scores: Scores
    answers: list[str]
    tasks: Figures


def _examine(
    name: str,
    directory: str,
    documents: list[Document],
    prompts: list[Prompt],
    tokenizer: Any,
    job: EvaluateSpec,
    tasks: TaskSpec | None,
    report: Callable[[int], None],
) -> _Found:
    """Scores, tasks and answers of one model, which is gone from memory afterwards."""
    model = load_model(directory, job.dtype, job.models.get("base"))
    grow_transformers(model, max(_rows(path) for path in job.models.values()))
    # Without a GPU nothing says what fits before the machine swaps.
    most = 64 if model.device.type == "cuda" else 8
    figures: Figures = {}
    try:
        _check_vocabulary(model, documents, prompts)
        scores = fitting(lambda size: score(model, documents, size, report), job.batch_size, most)
        if tasks and tasks.engine == "transformers":
            own = load_tokenizer(job.tokenizer_dir)  # lm-eval gives it a padding token
            figures = fitting(lambda size: run_tasks(tasks, model, own, size), job.batch_size, most)
        answers = answer(
            model,
            tokenizer,
            prompts,
            max_new_tokens=job.max_new_tokens,
            stop_ids=read_stop_ids(job.token_store),
            on_answered=lambda done: report(len(documents) + bool(tasks) + done),
        )
    except ModelError as error:
        raise ModelError(f"{name} model {directory}: {error}") from error
    return _Found(scores, answers, figures)


def _rows(directory: str) -> int:
    """Rows of a model's embedding. The base model gets those that were added to it before it was trained."""
    path = Path(directory) / "config.json"
    config = read_json(path, ModelError) if path.is_file() else {}
    return (config.get("text_config") or config).get("vocab_size", 0)


def _check_vocabulary(model: Any, documents: list[Document], prompts: list[Prompt]) -> None:
    sequences = [*(document.tokens for document in documents), *(prompt.token_ids for prompt in prompts)]
    largest = max((int(max(sequence)) for sequence in sequences), default=0)
    size = model.config.get_text_config().vocab_size
    if largest >= size:
        raise ModelError(f"token id {largest} is beyond the vocabulary of {size}")


def _metrics(scores: dict[str, Scores]) -> dict[str, Any]:
    models = {
        name: {"loss": s.loss, "perplexity": s.perplexity, "accuracy": s.accuracy, "tokens": s.tokens}
        for name, s in scores.items()
    }
    if not scores:
        return {"documents": 0, "tokens": 0, "note": NO_ROWS, "models": {}, "difference": {}}
    first, last = next(iter(scores.values())), list(scores.values())[-1]
    difference = loss_difference(last, first)
    return {
        "documents": len(first.tokens_D),
        "tokens": first.tokens,
        "note": "",
        "models": models,
        "difference": {
            "loss": difference.mean,
            "loss_stderr": difference.stderr,
            "accuracy": last.accuracy - first.accuracy,
        },
    }


def _write(output: Path, metrics: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    output.mkdir(parents=True, exist_ok=True)
    (output / "metrics.json").write_text(json.dumps(metrics, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
    (output / "samples.jsonl").write_text(lines, encoding="utf-8")
    (output / "report.md").write_text(markdown(metrics, samples), encoding="utf-8")
