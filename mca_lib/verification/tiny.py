"""A tiny model of every family with every feature of its table on: what the families' cards are measured on."""

from pathlib import Path
from typing import Any

from mca_lib.errors import ModelError

SHAPE: dict[str, Any] = {
    "vocab_size": 1027,  # odd: every tensor parallel size pads it
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # larger than usual, so that a wrong layer shows in the logits
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# With heads of 16 the wavelengths are 6, 11, 20, 35, ...: short of, between and beyond the limits 8 and 27.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 32.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 5.0,
    "original_max_position_embeddings": 40,
}

TINY: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "attention_bias": True, "rope_parameters": LLAMA3_ROPE},
    "qwen2": {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 1000.0}},
    "qwen3": {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
}
"""Model type → differences from `SHAPE`."""


def tiny_config(model_type: str) -> dict[str, Any]:
    """Fields of the transformers config. Raises ModelError for a family that has no row here."""
    if model_type not in TINY:
        raise ModelError(f"mca_lib/verification/tiny.py: no tiny config for model type {model_type!r}; add one")
    return {"model_type": model_type, **SHAPE, **TINY[model_type]}


def make_tiny(directory: Path, model_type: str, seed: int = 0) -> Path:
    """Write the family's tiny model with a tokenizer that speaks ChatML, as a Hugging Face directory, fp32.

    Every weight counts: biases and norms are not at their neutral initial values.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from mca_lib.tiny_models import make_tokenizer

    values = tiny_config(model_type)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("bias"):
                tensor.normal_(0, 0.3)
            elif "norm" in name:
                tensor.uniform_(0.5, 1.5)
    model.to(torch.float32).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    _add_missing(directory)
    return directory


def _add_missing(directory: Path) -> None:
    """Random values for what the family's table has and transformers does not build: multi-token prediction."""
    import torch
    from safetensors.torch import load_file, save_file

    from mca_lib.converter.plan import entries
    from mca_lib.models.config import McaModelConfig

    config, path = McaModelConfig.from_pretrained(directory), directory / "model.safetensors"
    tensors = load_file(path)
    missing = {
        name: shape
        for entry in entries(config)
        for name, shape in zip(entry.hf, entry.mapping.hf_shapes(config), strict=True)
        if name not in tensors
    }
    if missing:
        added = {name: torch.randn(shape) * SHAPE["initializer_range"] for name, shape in missing.items()}
        save_file(tensors | added, path, metadata={"format": "pt"})
