"""Tiny Hugging Face models with random weights: the demonstration's base model, and what the tests convert and train.

Everything is decided by the arguments: the same call writes the same bytes. All families share one tokenizer, a
byte-level BPE that splits text as Qwen2's does (so that transformers, which rebuilds a Qwen2 tokenizer from its class
and not from the file, gets the same tokens) and speaks ChatML, LLaMA-Factory's template `chatml`.
"""

import importlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

type Family = Literal["llama", "qwen2", "qwen3"]

# Family -> (config class, model class) in transformers, and what differs from SHAPE.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    # As in the real Qwen3 models, the size of a head is not hidden_size / num_attention_heads.
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 48}),
}

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
}

VOCAB_SIZE = 1024
PAD, BEGIN, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Splits off letters, single digits, punctuation and blanks as the tokenizers of Qwen2 and Qwen3 do.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tiny_model(
    directory: Path | str, family: Family = "llama", *, seed: int = 0, dtype: str = "float32", **overrides: Any
) -> Path:
    """Write a tiny model with its tokenizer as a Hugging Face directory and return its path.

    Args:
        directory: created with its parents; files in it are overwritten.
        seed: of the random weights.
        dtype: of the weights, `float32` or `bfloat16`.
        overrides: fields of the transformers config, for instance `num_hidden_layers=2`.
    """
    import torch
    import transformers

    directory = Path(directory)
    tokenizer = make_tokenizer()
    config = _config(family, len(tokenizer), dtype, overrides)
    model_class = getattr(transformers, FAMILIES[family][1])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).to(torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                # Norm weights of exactly 1 and biases of exactly 0 would hide a converter that drops or swaps them.
                if parameter.ndim == 1:
                    parameter.add_(0.05 * torch.randn_like(parameter))
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _config(family: str, vocab_size: int, dtype: str, overrides: dict[str, Any]) -> "PretrainedConfig":
    transformers = importlib.import_module("transformers")
    config_class, model_class, difference = FAMILIES[family]
    special = dict(zip((PAD, BEGIN, END), range(3), strict=True))
    fields = {
        **SHAPE,
        **difference,
        "vocab_size": vocab_size,
        "bos_token_id": None,
        "eos_token_id": special[END],
        "pad_token_id": special[PAD],
        "architectures": [model_class],
        "dtype": dtype,
        **overrides,
    }
    return getattr(transformers, config_class)(**fields)


def make_tokenizer() -> "PreTrainedTokenizerBase":
    """A byte-level BPE of about VOCAB_SIZE tokens, trained on the demonstration's rows; ids 0 to 2 are special."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_trained(),
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[BEGIN],
        model_max_length=SHAPE["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


@cache
def _trained():
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer


def _corpus() -> Iterable[str]:
    from mca_lib.demo_rows import make_rows

    for row in make_rows():
        yield from row.values()
    yield "system user assistant"
