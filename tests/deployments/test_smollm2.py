"""The helper that turns the packaged GGUF file of SmolLM2-135M-Instruct into a Hugging Face directory."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from deployments import smollm2
from mca_lib.errors import ModelError, ResourceError


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return smollm2.make_smollm2(tmp_path_factory.mktemp("smollm2") / "hf")


def test_config_is_the_original_one(model_dir):
    config = AutoConfig.from_pretrained(model_dir)
    assert config.rope_parameters["rope_theta"] == 100000
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings
    assert (config.max_position_embeddings, config.vocab_size) == (8192, 49152)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)


def test_weights_are_bf16_and_embeddings_are_stored_once(model_dir):
    with safe_open(model_dir / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        assert weights.get_slice("model.embed_tokens.weight").get_dtype() == "BF16"
    assert "lm_head.weight" not in names
    assert len(names) == 2 + 9 * 30


def test_tokenizer_splits_digits_as_in_training(model_dir):
    """GGUF names this rule `smollm`; without it the two line feeds would stay apart."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert tokenizer.tokenize("In 2024\n\n2") == ["In", "Ġ", "2", "0", "2", "4", "ĊĊ", "2"]
    text = "Zürich – 東京, 3.14 <|im_end|>\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_special_tokens_are_the_original_ones(model_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer("a").input_ids == [81]  # no token is put before or after
    generation = GenerationConfig.from_pretrained(model_dir)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)


def test_model_answers_a_question(model_dir):
    """Any mistake in names, rotary order, norms or tokens turns the answer into noise."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert "named SmolLM" in tokenizer.decode(prompt["input_ids"][0])
    answer_1T = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    assert tokenizer.decode(answer_1T[0, prompt["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"


def test_existing_model_directory_is_left_alone(model_dir):
    before = (model_dir / "model.safetensors").stat()
    assert smollm2.make_smollm2(model_dir) == model_dir
    assert (model_dir / "model.safetensors").stat() == before


def test_foreign_directory_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("keep me")
    with pytest.raises(ModelError, match="exists and is not a model directory"):
        smollm2.make_smollm2(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "keep me"


def test_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(reader):
        raise ModelError("broken tokenizer")

    monkeypatch.setattr(smollm2, "read_tokenizer", fail)
    with pytest.raises(ModelError, match="broken tokenizer"):
        smollm2.make_smollm2(tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


def test_missing_package_is_one_line_that_says_how_to_install(tmp_path, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    assert smollm2.main([str(tmp_path / "hf")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "gguf" in error
    assert "uv sync --group dev" in error
    with pytest.raises(ResourceError):
        smollm2.find_gguf()
