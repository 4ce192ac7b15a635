"""Tiny random models of every family, in Hugging Face format, for tests."""

from pathlib import Path
from typing import Any

SIZES = {
    "vocab_size": 99,  # odd: every tensor parallel size pads it
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # larger than usual, so that a wrong layer shows in the logits
    "bos_token_id": 1,
    "eos_token_id": 2,
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

QWEN_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-mha": {"model_type": "llama", "num_key_value_heads": 4},
    "llama-mqa": {"model_type": "llama", "num_key_value_heads": 1},
    "llama-bias": {"model_type": "llama", "attention_bias": True},
    "llama-head-dim": {"model_type": "llama", "head_dim": 24},
    "llama3-rope": {"model_type": "llama", "head_dim": 16, "rope_parameters": LLAMA3_ROPE},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-bias": {"model_type": "qwen3", "head_dim": 12, "attention_bias": True, "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "qwen3-moe": {"model_type": "qwen3_moe", "head_dim": 12, "num_experts": 8, "norm_topk_prob": True, **QWEN_EXPERTS},
    "qwen3-moe-mixed": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "attention_bias": True,
        "mlp_only_layers": [1],
        **QWEN_EXPERTS,
    },
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 24,
        **QWEN_EXPERTS,
    },
}
"""Name → differences from `SIZES`."""


def hf_config(variant: str, **changes: Any) -> Any:
    """transformers' config object of a variant."""
    from transformers import AutoConfig

    values = {**SIZES, **VARIANTS[variant], **changes}
    return AutoConfig.for_model(values.pop("model_type"), **values)


def hf_model(variant: str, dtype: str = "float32", seed: int = 0, **changes: Any) -> Any:
    """A random model whose every weight counts: biases and norms are not at their neutral initial values."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hf_config(variant, **changes), attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
    return model.to(getattr(torch, dtype)).eval()


def save_hf(directory: Path, variant: str, dtype: str = "float32", max_shard_size: str = "5GB", **changes: Any) -> Path:
    """Write a variant as a Hugging Face directory."""
    hf_model(variant, dtype, **changes).save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def token_ids(batch: int = 2, length: int = 24, vocab_size: int = SIZES["vocab_size"], seed: int = 1) -> Any:
    """Random token ids, [B, S]."""
    import torch

    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))
