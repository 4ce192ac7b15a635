"""Pairs of answers in the job `evaluate`: figures against transformers, one answer at a time."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mca_lib.data.token_store import TokenStoreWriter
from mca_lib.demo_rows import make_preference_rows
from mca_lib.evaluate import evaluate
from mca_lib.tiny_models import make_tiny_model, make_tokenizer

ROWS = make_preference_rows()[:10]


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pairs")
    shape = {"num_hidden_layers": 2, "initializer_range": 0.3}
    models = {name: str(make_tiny_model(folder / name, seed=i, **shape)) for i, name in enumerate(("base", "trained"))}
    with TokenStoreWriter(folder / "eval") as writer:
        for first in range(0, len(ROWS), 2):  # two pairs a row
            writer.add_row([_encode(row, side) for row in ROWS[first : first + 2] for side in ("chosen", "rejected")])
    (folder / "meta.json").write_text(json.dumps({"stop_token_ids": [2], "objective": "dpo"}))
    return {
        "models": models,
        "token_store": str(folder / "eval"),
        "tokenizer_dir": models["trained"],
        "max_rows": None,
        "dtype": "float32",
        "prompts": [],
        "num_samples": 3,
        "max_new_tokens": 2,
        "batch_size": 4,
        "output": str(folder / "out"),
    }


def _encode(row: dict[str, str], side: str) -> tuple[list[int], list[bool]]:
    tokenizer = make_tokenizer()
    chat = [{"role": "user", "content": row["instruction"]}]
    prompt = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)).input_ids
    answer = tokenizer(row[side] + "<|im_end|>\n").input_ids
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def _logp(model: Any, document: tuple[list[int], list[bool]]) -> float:
    ids, mask = torch.tensor(document[0]), torch.tensor(document[1])
    with torch.no_grad():
        logps = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], dim=-1)
    return logps.gather(1, ids[1:, None])[mask[1:], 0].double().sum().item()


def _run(spec: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return evaluate(spec | changes, lambda done, total, **metrics: None)


def test_figures_are_those_of_each_answer_by_transformers(spec):
    found = _run(spec)
    logps = {}
    for name, directory in spec["models"].items():
        model = AutoModelForCausalLM.from_pretrained(directory)
        logps[name] = np.array([[_logp(model, _encode(row, side)) for side in ("chosen", "rejected")] for row in ROWS])
    margins = {name: values[:, 0] - values[:, 1] for name, values in logps.items()}
    rewards, preference = margins["trained"] - margins["base"], found["preference"]
    assert preference["pairs"] == found["documents"] == len(ROWS)
    assert preference["likelier"] == {name: np.mean(m > 0) for name, m in margins.items()}
    assert preference["reward_accuracy"] == np.mean(rewards > 0)
    assert preference["reward_margin"] == pytest.approx(rewards.mean(), rel=1e-4)
    assert preference["reward_margin_stderr"] == pytest.approx(rewards.std(ddof=1) / len(ROWS) ** 0.5, rel=1e-4)
    tokens = sum(sum(_encode(row, "chosen")[1]) for row in ROWS)
    assert found["tokens"] == tokens
    for name, values in logps.items():
        assert found["models"][name]["loss"] == pytest.approx(-values[:, 0].sum() / tokens, rel=1e-5)


def test_samples_are_of_different_questions_with_the_chosen_answer_as_reference(spec):
    _run(spec)
    samples = [json.loads(line) for line in (Path(spec["output"]) / "samples.jsonl").read_text().splitlines()]
    assert [sample["reference"] for sample in samples] == [row["chosen"] for row in ROWS[:3]]


def test_max_rows_bounds_the_pairs(spec):
    found = _run(spec, max_rows=4, num_samples=0)
    assert (found["preference"]["pairs"], found["documents"]) == (4, 4)


def test_a_model_has_no_reward_by_itself(spec):
    base = spec["models"]["base"]
    preference = _run(spec, models={"base": base, "trained": base}, num_samples=0)["preference"]
    assert (preference["reward_margin"], preference["reward_accuracy"]) == (0.0, 0.0)
