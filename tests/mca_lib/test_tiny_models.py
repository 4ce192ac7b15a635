"""Tiny models: transformers loads them, and their tokenizer means the same in every family."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mca_lib.tiny_models import BEGIN, END, FAMILIES, PAD, make_tiny_model, make_tokenizer


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model_dir(request, tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp(request.param), request.param, num_hidden_layers=2)


def test_transformers_loads_it_as_its_family(model_dir):
    model, loading = AutoModelForCausalLM.from_pretrained(model_dir, output_loading_info=True)
    assert model.config.model_type in model_dir.name
    assert model.config.num_hidden_layers == 2
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]


def test_reloaded_tokenizer_gives_the_same_tokens(model_dir):
    """transformers may rebuild a tokenizer from its class: the split must be the one of Qwen2 for this to hold."""
    text = "I'LL count 2024 ferries:\n\n  heron…  東京 <|im_end|>\n"
    reloaded, original = AutoTokenizer.from_pretrained(model_dir), make_tokenizer()
    assert reloaded(text).input_ids == original(text).input_ids
    assert reloaded.decode(original(text).input_ids) == text
    assert reloaded.convert_tokens_to_ids([PAD, BEGIN, END]) == [0, 1, 2]
    assert (reloaded.pad_token, reloaded.eos_token) == (PAD, END)


def test_chat_template_is_chatml(model_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    chat = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_no_norm_or_bias_has_its_trivial_value(model_dir):
    for name, tensor in load_file(model_dir / "model.safetensors").items():
        if tensor.ndim == 1:
            assert tensor.std() > 0, name


def test_seed_dtype_and_overrides_decide_the_weights(tmp_path):
    options = {"num_hidden_layers": 1, "hidden_size": 64, "tie_word_embeddings": True, "dtype": "bfloat16"}
    first, again, other = (
        load_file(make_tiny_model(tmp_path / name, "qwen3", seed=seed, **options) / "model.safetensors")
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    )
    assert "lm_head.weight" not in first
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not any(torch.equal(tensor, other[name]) for name, tensor in first.items())


def test_making_a_model_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    make_tiny_model(tmp_path, "llama", num_hidden_layers=1)
    assert torch.equal(torch.rand(3), expected)
