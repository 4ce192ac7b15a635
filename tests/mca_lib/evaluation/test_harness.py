"""What lm-eval measures, against log-likelihoods and greedy answers of plain transformers."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from mca_lib.errors import ConfigError, ResourceError
from mca_lib.evaluate import load_model
from mca_lib.evaluation.batch_size import fitting
from mca_lib.evaluation.harness import TaskSpec, run_tasks, sandboxed_templates
from mca_lib.tiny_models import make_tiny_model
from mca_lib.tokenizer import load_tokenizer
from tests.mca_lib.evaluation.tiny_tasks import ROWS, write_tasks

SHAPE = {"num_hidden_layers": 2, "initializer_range": 0.3}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "m", seed=3, **SHAPE)


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return load_model(directory, "float32")


@pytest.fixture
def tokenizer(directory: Path) -> Any:
    return load_tokenizer(directory)


@torch.inference_mode()
def log_likelihood(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    """In float64, of the whole text alone: (log p, whether each token was the most likely one)."""
    prompt, ids = tokenizer(context).input_ids, tokenizer(context + continuation).input_ids
    logits_SV = model(torch.tensor([ids])).logits[0].double()
    log_p_SV = logits_SV.log_softmax(-1)
    places = range(len(prompt), len(ids))
    assert ids[: len(prompt)] == prompt
    greedy = all(int(logits_SV[i - 1].argmax()) == ids[i] for i in places)
    return sum(float(log_p_SV[i - 1, ids[i]]) for i in places), greedy


@torch.inference_mode()
def greedy_answer(model: Any, tokenizer: Any, context: str, tokens: int, until: str) -> str:
    ids = tokenizer(context).input_ids
    start = len(ids)
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tokenizer.decode(ids[start:], skip_special_tokens=True).split(until)[0]


def binomial(hits: list[bool]) -> dict[str, Any]:
    p, n = sum(hits) / len(hits), len(hits)
    return {"value": p, "stderr": pytest.approx(math.sqrt(p * (1 - p) / (n - 1))), "documents": n}


def test_figures_are_those_of_plain_transformers(model: Any, tokenizer: Any, directory: Path, tmp_path: Path):
    # What the model answers to two of the questions is made their right answer.
    said = [greedy_answer(model, tokenizer, row["question"], 6, "e") for row in ROWS]
    rows = [{**row, "choices": [said[i], *row["choices"][1:]]} if i in (0, 2) else row for i, row in enumerate(ROWS)]
    folder = write_tasks(tmp_path / "tasks", rows)
    # A published config that samples and penalizes must have no say.
    model.generation_config = GenerationConfig(do_sample=True, temperature=9.0, repetition_penalty=5.0)
    found = run_tasks(TaskSpec(["tiny", "likely"], str(folder)), model, load_tokenizer(directory), 3)

    scores = [[log_likelihood(model, tokenizer, row["question"], f" {c}") for c in row["choices"]] for row in rows]
    sums = [np.array([log_p for log_p, _ in each]) for each in scores]
    lengths = [np.array([len(choice) for choice in row["choices"]]) for row in rows]
    right = [row["answer"] for row in rows]
    assert found["choices.acc"] == binomial([s.argmax() == r for s, r in zip(sums, right, strict=True)])
    by_length = [(s / n).argmax() == r for s, n, r in zip(sums, lengths, right, strict=True)]
    assert found["choices.acc_norm"] == binomial(by_length)

    targets = [each[answer] for each, answer in zip(scores, right, strict=True)]
    # fp32 logits on both sides: a few units of the last place in a sum of some tokens.
    perplexity = math.exp(-np.mean([log_p for log_p, _ in targets]))
    assert found["likely.perplexity"]["value"] == pytest.approx(perplexity, rel=1e-5)
    assert found["likely.acc"] == binomial([greedy for _, greedy in targets])

    assert found["answers.exact_match.strict_match"] == binomial([True, said[1] == "two", True, said[3] == "four"])


def test_batch_size_limit_and_shots(model: Any, directory: Path, tmp_path: Path):
    folder = str(write_tasks(tmp_path / "tasks"))
    spec = TaskSpec(["choices", "likely"], folder, num_fewshot=1, limit=3)
    alone, together = (run_tasks(spec, model, load_tokenizer(directory), size) for size in (1, 5))
    assert alone["choices.acc"]["documents"] == 3
    assert together["likely.perplexity"]["value"] == pytest.approx(alone["likely.perplexity"]["value"], rel=1e-5)
    without = run_tasks(TaskSpec(["likely"], folder, limit=3), model, load_tokenizer(directory), 5)
    assert without["likely.perplexity"]["value"] != pytest.approx(alone["likely.perplexity"]["value"], rel=1e-3)
    chat = run_tasks(TaskSpec(["likely"], folder, limit=3, chat_template=True), model, load_tokenizer(directory), 5)
    assert chat["likely.perplexity"]["value"] != pytest.approx(without["likely.perplexity"]["value"], rel=1e-3)


def test_a_group_has_figures_of_its_own(model: Any, tokenizer: Any, tmp_path: Path):
    found = run_tasks(TaskSpec(["all"], str(write_tasks(tmp_path / "tasks"))), model, tokenizer, 5)
    assert found["all.acc"]["value"] == (found["choices.acc"]["value"] + found["likely.acc"]["value"]) / 2


ESCAPE = """\
include: common
task: escape
output_type: loglikelihood
doc_to_text: "{{ question.__class__.__mro__[1].__subclasses__() | length }}"
doc_to_target: "{{choices[answer]}}"
"""


def test_a_template_reaches_no_python(model: Any, tokenizer: Any, tmp_path: Path):
    """lm-eval's own environment lets it: the first line tells when the sandbox is no longer needed."""
    import lm_eval.utils

    assert int(lm_eval.utils.apply_template("{{ q.__class__.__mro__[1].__subclasses__() | length }}", {"q": ""})) > 100
    folder = str(write_tasks(tmp_path / "tasks", escape=ESCAPE))
    with pytest.raises(ConfigError, match=r"cannot load escape: SecurityError: access to attribute '__class__'"):
        run_tasks(TaskSpec(["escape"], folder), model, tokenizer, 5)
    with sandboxed_templates():
        assert lm_eval.utils.apply_template("{{ q | regex_replace('a', 'b') }}", {"q": "aha"}) == "bhb"


def test_a_template_that_fits_no_row_is_said_in_a_line(model: Any, tokenizer: Any, tmp_path: Path):
    wrong = ESCAPE.replace("question.__class__.__mro__[1].__subclasses__() | length", "query")
    with pytest.raises(ConfigError, match=r"^eval\.tasks: lm-eval cannot load escape: UndefinedError: 'query'"):
        run_tasks(TaskSpec(["escape"], str(write_tasks(tmp_path / "t", escape=wrong))), model, tokenizer, 5)


def test_auto_takes_the_largest_batch_that_fits():
    tried = []

    def run(size: int) -> str:
        tried.append(size)
        if size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return f"{size} rows"

    assert fitting(run, "auto", 16) == "2 rows"
    assert tried == [16, 8, 4, 2]
    with pytest.raises(torch.OutOfMemoryError):
        fitting(run, 16, 2)  # what a user sets is what is done
    with pytest.raises(ValueError, match="another"):
        fitting(lambda size: int("another"), "auto", 16)
    with pytest.raises(ResourceError, match="not even one row"):
        fitting(lambda size: run(size + 2), "auto", 16)
