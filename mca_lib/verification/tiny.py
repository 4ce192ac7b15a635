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

# Channels 0 to 7 of such a head turn 6.4, 3.6, 2.0, ... times in 40 tokens: the blend goes from 4 turns to half a turn.
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 40,
}

LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}

# Rows have 120 tokens: every window cuts most of them.
WINDOW = {"use_sliding_window": True, "sliding_window": 17}

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

TINY: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE},
    "mistral": {"head_dim": 12, "sliding_window": 17, "rope_parameters": LINEAR_ROPE},
    "mixtral": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 17,
        "rope_parameters": YARN_ROPE,
    },
    "qwen2": {**WINDOW, "max_window_layers": 2, "rope_parameters": YARN_ROPE},
    "qwen2_moe": {
        **EXPERTS,
        **WINDOW,
        "max_window_layers": 3,
        "num_experts": 4,
        "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 24,
        "rope_parameters": YARN_ROPE,
    },
    "qwen3": {
        **WINDOW,
        "head_dim": 12,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        "rope_parameters": YARN_ROPE | {"truncate": False, "attention_factor": 0.7},
    },
    "qwen3_moe": {
        **EXPERTS,
        "head_dim": 12,
        "attention_bias": True,
        "num_experts": 8,
        "norm_topk_prob": True,
        **WINDOW,
        "mlp_only_layers": [1],
        "rope_parameters": YARN_ROPE,
    },
    "nemotron_h": {
        "head_dim": 12,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "conv_kernel": 3,
        "chunk_size": 16,
        "time_step_min": 1e-9,  # see the family: transformers' limit is not the model's
        "layer_norm_epsilon": 1e-3,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "routed_scaling_factor": 2.5,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 7,
        "num_nextn_predict_layers": 1,
        "rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.3},
    },
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
            elif "norm" in name or name.endswith((".D", ".A_log")):
                tensor.uniform_(0.5, 1.5)
    model.to(torch.float32).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    _add_missing(directory)
    return directory


def _add_missing(directory: Path) -> None:
    """Random values for what the family's table has and transformers does not build: multi-token prediction.

    The copies that a source stores beside it are those of the real ones.
    """
    import torch
    from safetensors.torch import load_file, save_file

    from mca_lib.converter.plan import entries
    from mca_lib.models.config import McaModelConfig
    from mca_lib.models.registry import family_of

    config, path = McaModelConfig.from_pretrained(directory), directory / "model.safetensors"
    tensors = load_file(path)
    missing = {
        name: shape
        for entry in entries(config)
        for name, shape in zip(entry.hf, entry.mapping.hf_shapes(config), strict=True)
        if name not in tensors
    }
    if missing:
        torch.manual_seed(1)
        tensors |= {name: torch.randn(shape) * SHAPE["initializer_range"] for name, shape in missing.items()}
        copies = family_of(config.model_type).copies_of(config).items()
        tensors |= {name: tensors[of].clone() for name, of in copies if of in tensors and name not in tensors}
        save_file(tensors, path, metadata={"format": "pt"})
