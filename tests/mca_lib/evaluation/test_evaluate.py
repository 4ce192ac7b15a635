"""The job `evaluate` from files to files."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mca_lib.data.token_store import TokenStoreWriter
from mca_lib.demo_rows import make_rows
from mca_lib.errors import ConfigError, ModelError
from mca_lib.evaluate import NO_ROWS, evaluate
from mca_lib.evaluation.samples import recipe_prompts
from mca_lib.tiny_models import make_tiny_model, make_tokenizer

ROWS = [row for row in make_rows() if not row["input"]][:12]
SHAPE = {"num_hidden_layers": 2, "initializer_range": 0.3}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: str(make_tiny_model(folder / name, seed=seed, **SHAPE)) for seed, name in enumerate(("base", "trained"))
    }


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> dict[str, Path]:
    """The same documents, one per row, and packed by four in another order."""
    folder = tmp_path_factory.mktemp("stores")
    documents = [_encode(row) for row in ROWS]
    for name, rows in {"single": [[d] for d in documents], "packed": _packs(documents[::-1], 4)}.items():
        with TokenStoreWriter(folder / name / "eval") as writer:
            for row in rows:
                writer.add_row(row)
        (folder / name / "meta.json").write_text(json.dumps({"stop_token_ids": [2]}))
    return {name: folder / name / "eval" for name in ("single", "packed")}


def _encode(row: dict[str, str]) -> tuple[list[int], list[bool]]:
    tokenizer = make_tokenizer()
    chat = [{"role": "user", "content": row["instruction"]}]
    prompt = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)).input_ids
    answer = tokenizer(row["output"] + "<|im_end|>\n").input_ids
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def _packs(documents: list, size: int) -> list[list]:
    return [documents[i : i + size] for i in range(0, len(documents), size)]


@pytest.fixture
def spec(models, stores, tmp_path) -> dict[str, Any]:
    return {
        "models": models,
        "token_store": str(stores["single"]),
        "tokenizer_dir": models["trained"],
        "max_rows": None,
        "dtype": "float32",
        "prompts": [],
        "num_samples": 2,
        "max_new_tokens": 8,
        "batch_size": 4,
        "output": str(tmp_path / "out"),
    }


def _run(spec: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return evaluate(spec | changes, lambda done, total, **metrics: None)


def _samples(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(spec["output"]) / "samples.jsonl").read_text().splitlines()]


def test_figures_equal_the_loss_that_transformers_computes(spec, models):
    """transformers' own shifted loss is a mean; weighted by tokens it must give the same number."""
    metrics = _run(spec)
    for name, directory in models.items():
        model = AutoModelForCausalLM.from_pretrained(directory)
        total = tokens = 0
        for ids, mask in map(_encode, ROWS):
            labels_1S = torch.tensor([[i if m else -100 for i, m in zip(ids, mask, strict=True)]])
            with torch.no_grad():
                loss = model(input_ids=torch.tensor([ids]), labels=labels_1S).loss.item()
            total, tokens = total + loss * sum(mask), tokens + sum(mask)
        assert metrics["models"][name]["loss"] == pytest.approx(total / tokens, rel=1e-5)
        assert metrics["models"][name]["tokens"] == metrics["tokens"] == tokens
    losses = {name: figures["loss"] for name, figures in metrics["models"].items()}
    assert metrics["documents"] == len(ROWS)
    assert metrics["difference"]["loss"] == pytest.approx(losses["trained"] - losses["base"], abs=1e-6)
    assert metrics["difference"]["loss_stderr"] > 0


def test_packed_rows_score_as_their_documents_alone(spec, stores):
    single = _run(spec, num_samples=0)
    packed = _run(spec, token_store=str(stores["packed"]), num_samples=0)
    for name in spec["models"]:
        assert packed["models"][name]["loss"] == pytest.approx(single["models"][name]["loss"], rel=1e-6)
        assert packed["models"][name]["accuracy"] == single["models"][name]["accuracy"]
    assert packed["difference"]["loss_stderr"] == pytest.approx(single["difference"]["loss_stderr"], rel=1e-4)


def test_equal_models_differ_by_nothing(spec, models):
    metrics = _run(spec, models={"base": models["base"], "trained": models["base"]})
    assert metrics["difference"] == {"loss": 0.0, "loss_stderr": 0.0, "accuracy": 0.0}


def test_max_rows_bounds_the_documents(spec):
    metrics = _run(spec, max_rows=5, num_samples=0)
    assert metrics["documents"] == 5
    assert metrics["tokens"] == sum(sum(_encode(row)[1]) for row in ROWS[:5])


def test_samples_are_greedy_continuations_of_held_out_prompts(spec, models):
    _run(spec)
    samples = _samples(spec)
    tokenizer = AutoTokenizer.from_pretrained(models["base"])
    assert [sample["reference"] for sample in samples] == [row["output"] for row in ROWS[:2]]
    for sample, row in zip(samples, ROWS, strict=False):
        assert sample["prompt"] == f"<|im_start|>user\n{row['instruction']}<|im_end|>\n<|im_start|>assistant\n"
        for name, directory in models.items():
            model = AutoModelForCausalLM.from_pretrained(directory)
            assert sample["answers"][name] == _greedy(model, tokenizer, sample["prompt"], 8)


def _greedy(model, tokenizer, prompt: str, count: int) -> str:
    ids = tokenizer(prompt).input_ids
    start = len(ids)
    while len(ids) < start + count and ids[-1] != tokenizer.eos_token_id:
        with torch.no_grad():
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    return tokenizer.decode(ids[start:], skip_special_tokens=True).strip()


def test_answers_end_at_the_stop_tokens_of_the_data_set(spec, stores, models, tmp_path):
    """The data set may end its answers with a token that neither model nor tokenizer call their end of text."""
    _run(spec)
    tokenizer = AutoTokenizer.from_pretrained(models["base"])
    first = tokenizer(_samples(spec)[0]["answers"]["trained"]).input_ids[0]
    folder = tmp_path / "stops"
    folder.mkdir()
    (folder / "eval").symlink_to(stores["single"])
    (folder / "meta.json").write_text(json.dumps({"stop_token_ids": [first]}))
    _run(spec, token_store=str(folder / "eval"))
    # The stop token itself is an ordinary word here, so it stays in the text.
    assert _samples(spec)[0]["answers"]["trained"] == tokenizer.decode([first]).strip()


def test_prompts_of_the_recipe_go_through_the_chat_template(spec):
    _run(spec, prompts=["Count from one to three.", "Hello"], num_samples=1)
    samples = _samples(spec)
    assert len(samples) == 2
    assert samples[1]["prompt"] == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert samples[1]["reference"] is None


def test_control_token_written_in_a_prompt_stays_text(models):
    tokenizer = AutoTokenizer.from_pretrained(models["base"])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    plain, written = recipe_prompts(["Hello", "Hello <|im_end|>"], tokenizer)
    assert plain.token_ids.count(end) == written.token_ids.count(end) == 1
    assert written.text == "<|im_start|>user\nHello <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    tokenizer.chat_template = None
    (bare,) = recipe_prompts(["Hello <|im_end|>"], tokenizer)
    assert end not in bare.token_ids


def test_prompt_without_tokens_is_named(models):
    tokenizer = AutoTokenizer.from_pretrained(models["base"])
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"eval\.prompts: prompt 1 has no tokens"):
        recipe_prompts(["Hello", ""], tokenizer)


@pytest.mark.parametrize("template", ["{% if %}", "{{ raise_exception('no\\nuser') }}", "{{ messages[0].a.b }}"])
def test_broken_chat_template_is_one_line(spec, models, tmp_path, template):
    _copy(models["trained"], tmp_path / "broken")
    (tmp_path / "broken" / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match="broken: its chat template cannot be rendered") as error:
        _run(spec, tokenizer_dir=str(tmp_path / "broken"), prompts=["Hello"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["{}", '{"model": {"type": "BPE"}}'])
def test_tokenizer_that_does_not_load_is_one_line(spec, models, tmp_path, content):
    _copy(models["trained"], tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match="broken: no tokenizer can be loaded") as error:
        _run(spec, tokenizer_dir=str(tmp_path / "broken"))
    assert "\n" not in str(error.value)


def test_plain_text_is_continued_from_its_middle(spec, tmp_path, models):
    tokenizer = make_tokenizer()
    ids = tokenizer("The flag of Norwick shows a heron.").input_ids
    with TokenStoreWriter(tmp_path / "pt" / "eval") as writer:
        writer.add_row([(ids, [True] * len(ids))])
    (tmp_path / "pt" / "meta.json").write_text(json.dumps({"stop_token_ids": [0]}))
    assert _run(spec, token_store=str(tmp_path / "pt" / "eval"))["tokens"] == len(ids) - 1
    (sample,) = _samples(spec)
    assert sample["prompt"] == tokenizer.decode(ids[: len(ids) // 2])
    assert sample["prompt"] + " " + sample["reference"] == "The flag of Norwick shows a heron."


def test_prompt_beyond_the_positions_is_refused(spec):
    with pytest.raises(ConfigError, match=r"eval\.prompts: prompt 1 has \d+ tokens"):
        _run(spec, prompts=["short", "heron " * 1100])


@pytest.mark.parametrize("split", ["missing", "unlearned"])
def test_without_held_out_rows_the_result_says_so(spec, tmp_path, split):
    if split == "unlearned":  # a document that was cut before its answer has no loss token
        with TokenStoreWriter(tmp_path / split) as writer:
            writer.add_row([([5, 6, 7], [False] * 3)])
    (tmp_path / "meta.json").write_text(json.dumps({"stop_token_ids": [2]}))
    metrics = _run(spec, token_store=str(tmp_path / split), prompts=["Hello"])
    assert metrics == {"documents": 0, "tokens": 0, "note": NO_ROWS, "models": {}, "difference": {}}
    assert len(_samples(spec)) == 1
    assert "No held-out rows" in (Path(spec["output"]) / "report.md").read_text()


def test_diverged_model_is_named(spec, models, tmp_path):
    weights = _copy(models["trained"], tmp_path / "diverged")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, tmp_path / "diverged" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"^trained model .*diverged: the loss of held-out document \d+ is nan"):
        _run(spec, models=models | {"trained": str(tmp_path / "diverged")})
    assert not Path(spec["output"]).exists()


def test_missing_weight_is_not_filled_with_random_numbers(spec, models, tmp_path):
    weights = _copy(models["trained"], tmp_path / "partial")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "partial" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing, first model\.layers\.1\.mlp\.up_proj\.weight"):
        _run(spec, models={"base": str(tmp_path / "partial")})


def test_truncated_weights_are_one_line_of_error(spec, models, tmp_path):
    _copy(models["trained"], tmp_path / "short")
    file = tmp_path / "short" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="short: transformers cannot load it") as error:
        _run(spec, models={"base": str(tmp_path / "short")})
    assert "\n" not in str(error.value)


def test_pickled_weights_are_refused(spec, models, tmp_path):
    weights = _copy(models["trained"], tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        _run(spec, models={"base": str(tmp_path / "pickled")})


def test_tokens_beyond_the_vocabulary_are_refused(spec, tmp_path):
    small = make_tiny_model(tmp_path / "small", num_hidden_layers=1, vocab_size=300)
    with pytest.raises(ModelError, match=r"base model .*small: token id \d+ is beyond the vocabulary of 300"):
        _run(spec, models={"base": str(small)})


def _copy(source: str, target: Path) -> dict[str, torch.Tensor]:
    """Copy a model directory and return its weights."""
    target.mkdir()
    for file in Path(source).iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return load_file(target / "model.safetensors")


def test_job_in_a_process_of_its_own(spec, tmp_path):
    """Its result and files are those of a call in this process, byte for byte, and its progress ends at the total."""
    expected = _run(spec)
    (tmp_path / "spec.json").write_text(json.dumps(spec | {"output": str(tmp_path / "job")}))
    command = [sys.executable, "-m", "mca_lib.job", "evaluate", str(tmp_path / "spec.json"), str(tmp_path / "r.json")]
    # As many threads as here: sums are rounded in the order in which threads share them out.
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    subprocess.run(command, check=True, env=os.environ | threads | {"MCAFLOW_PROGRESS": str(tmp_path / "progress")})
    assert json.loads((tmp_path / "r.json").read_text()) == {"ok": True, "result": expected}
    assert json.loads((tmp_path / "job" / "metrics.json").read_text()) == expected
    here, there = (
        {file.name: file.read_bytes() for file in folder.iterdir()} for folder in (tmp_path / "out", tmp_path / "job")
    )
    assert set(here) == {"metrics.json", "samples.jsonl", "report.md"}
    assert here == there
    lines = [json.loads(line) for line in (tmp_path / "progress").read_text().splitlines()]
    assert lines[-1] == {"done": 28, "total": 28, "model": "trained"}
    assert [line["done"] for line in lines] == sorted(line["done"] for line in lines)


def test_vllm_is_not_asked_to_run_an_adapter(spec, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    models = spec["models"] | {"trained": str(tmp_path / "adapter")}
    with pytest.raises(ConfigError, match=r"^eval\.engine: vllm runs whole models, .*adapter is an adapter"):
        _run(spec, models=models, tasks={"names": ["any"], "engine": "vllm"})
