"""Tiny random models of every family, in Hugging Face format, for tests."""

from copy import deepcopy
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

BASE_ROPE = {"rope_theta": 100.0}

# With a base of 100 and heads of 16, channels 0 to 7 turn 6.4, 3.6, 2.0, ... times in 40 tokens: the blend goes from
# the channel of 4 turns to that of half a turn.
YARN_ROPE = {
    **BASE_ROPE,
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 40,
}

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "rms_norm_eps": 1e-5,  # the latents' norms have 1e-6
    "num_mtp_layers": 0,
}

DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}

QWEN_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

DELTA_NETS = {
    "initializer_range": 0.1,  # with more, both libraries' gradients are 7e-5 away from those in float64
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-mha": {"model_type": "llama", "num_key_value_heads": 4},
    "llama-mqa": {"model_type": "llama", "num_key_value_heads": 1},
    "llama-bias": {"model_type": "llama", "attention_bias": True},
    "llama-head-dim": {"model_type": "llama", "head_dim": 24},
    "llama3-rope": {"model_type": "llama", "head_dim": 16, "rope_parameters": LLAMA3_ROPE},
    "llama-mlp-bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "linear-rope": {"model_type": "llama", "rope_parameters": {**BASE_ROPE, "rope_type": "linear", "factor": 3.0}},
    "yarn-rope": {"model_type": "llama", "head_dim": 16, "rope_parameters": YARN_ROPE},
    "yarn-attention-factor": {
        "model_type": "qwen3",
        "head_dim": 16,
        "rope_parameters": {**YARN_ROPE, "truncate": False, "attention_factor": 0.7},
    },
    "mistral": {"model_type": "mistral", "head_dim": 12, "sliding_window": 7},
    "mistral-full": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3-window": {
        "model_type": "qwen3",
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    },
    "phi3-longrope": {
        "model_type": "phi3",
        "sliding_window": 7,
        "original_max_position_embeddings": 12,
        "pad_token_id": None,
        "rope_parameters": {
            **BASE_ROPE,
            "rope_type": "longrope",
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.3, 1.7],
            "long_factor": [1.5, 2.5, 6.0],
        },
    },
    "seed-oss": {
        "model_type": "seed_oss",
        "head_dim": 12,
        "attention_out_bias": True,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "pad_token_id": None,  # the default, 1, would have no gradient
    },
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-bias": {"model_type": "qwen3", "head_dim": 12, "attention_bias": True, "tie_word_embeddings": True},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 12,
        "attention_bias": True,
        "query_pre_attn_scalar": 9,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
        },
        "pad_token_id": None,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 12,
        "sliding_window": 7,
        "swiglu_limit": 1.5,
        "rope_parameters": {**YARN_ROPE, "truncate": False},
    },
    "olmo2": {"model_type": "olmo2", "head_dim": 12, "attention_bias": True, "pad_token_id": None},
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
    "qwen3.5": {"model_type": "qwen3_5_text", "attention_bias": True, "tie_word_embeddings": True, **DELTA_NETS},
    "qwen3-next": {
        "model_type": "qwen3_next",
        "num_experts": 4,
        "mlp_only_layers": [1],
        "shared_expert_intermediate_size": 24,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention"],
        "num_mtp_layers": 1,
        "mtp_layer_types": ["full_attention"],
        **QWEN_EXPERTS,
        **DELTA_NETS,
    },
    "deepseek-mtp": {**DEEPSEEK, "num_mtp_layers": 2},
    "glm4-moe": {
        "model_type": "glm4_moe",
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 16,
        "num_mtp_layers": 1,
        "rope_parameters": {**YARN_ROPE, "partial_rotary_factor": 0.5},
    },
    "minimax-m2": {
        "model_type": "minimax_m2",
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "rotary_dim": 8,
        "rope_parameters": YARN_ROPE,
    },
    "deepseek-yarn": {
        **DEEPSEEK,
        "q_lora_rank": None,
        "rope_parameters": DEEPSEEK_YARN,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
    },
}
"""Name → differences from `SIZES`."""

WITH_EXPERTS = [
    "mixtral",
    "qwen3-moe",
    "qwen3-moe-mixed",
    "qwen2-moe",
    "qwen3-next",
    "deepseek-mtp",
    "deepseek-yarn",
    "glm4-moe",
    "minimax-m2",
]
"""Variants with a mixture of experts."""


def hf_config(variant: str, **changes: Any) -> Any:
    """transformers' config object of a variant."""
    from transformers import AutoConfig

    values = deepcopy({**SIZES, **VARIANTS[variant], **changes})  # transformers writes into the rope
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
            elif name.endswith(("sinks", "router.weight")):
                parameter.normal_()
            elif name.endswith("linear_attn.A_log"):
                parameter.uniform_(-4, 1)  # heads that remember a row of tokens, and such that forget at once
            elif "norm" in name:
                parameter.add_(torch.rand_like(parameter) - 0.5)  # to the 1 or the 0 that is neutral
    return _ready(model, getattr(torch, dtype))


def save_hf(directory: Path, variant: str, dtype: str = "float32", max_shard_size: str = "5GB", **changes: Any) -> Path:
    """Write a variant as a Hugging Face directory."""
    model = hf_model(variant, dtype, **changes)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    if getattr(model.config, "num_mtp_layers", 0):
        _add_mtp(directory, model)
    return directory


def mtp_model(model: Any, seed: int = 0) -> Any:
    """transformers' multi-token prediction layers of a model, random."""
    import torch
    from transformers.modeling_layers import MtpModel

    torch.manual_seed(seed)
    mtp = MtpModel(model, model.config.num_mtp_layers)
    with torch.no_grad():
        for name, parameter in mtp.layers.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.2)
    return _ready(mtp, model.dtype)


def _ready(model: Any, dtype: Any) -> Any:
    """Cast, with expert biases that count; these are fp32 in every model, as transformers loads them."""
    model = model.to(dtype).eval()
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = module.e_score_correction_bias.float().uniform_(-0.3, 0.3)
    return model


QWEN_MTP = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "shared_head.norm.weight": "norm.weight",
}


def mtp_as_stored(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors of `model`'s `MtpModel` under the names of DeepSeek's checkpoints, or Qwen's."""
    first, stored, qwen = model.config.num_hidden_layers, {}, model.config.model_type.startswith("qwen")
    for name, tensor in tensors.items():
        if not name.startswith("layers."):
            continue
        _, layer, rest = name.split(".", 2)
        rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        prefix = f"mtp.layers.{layer}." if qwen else f"model.layers.{first + int(layer)}."
        if qwen and rest in QWEN_MTP:
            prefix, rest = "mtp.", QWEN_MTP[rest]
        if rest == "mlp.experts.gate_up_proj":
            for i, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                stored[f"{prefix}mlp.experts.{i}.gate_proj.weight"] = gate
                stored[f"{prefix}mlp.experts.{i}.up_proj.weight"] = up
        elif rest == "mlp.experts.down_proj":
            stored |= {f"{prefix}mlp.experts.{i}.down_proj.weight": expert for i, expert in enumerate(tensor)}
        else:
            stored[prefix + rest] = tensor
    return stored


def _add_mtp(directory: Path, model: Any) -> None:
    """Store multi-token prediction layers, for DeepSeek with its copies of embedding and output layer."""
    from safetensors.torch import load_file, save_file

    mtp = mtp_model(model)
    tensors = load_file(directory / "model.safetensors") | mtp_as_stored(model, mtp.state_dict())
    layers = model.config.num_mtp_layers if model.config.model_type == "deepseek_v3" else 0
    for i in range(model.config.num_hidden_layers, model.config.num_hidden_layers + layers):
        tensors[f"model.layers.{i}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors[f"model.layers.{i}.shared_head.head.weight"] = model.lm_head.weight.detach()
    save_file(
        {n: t.clone().contiguous() for n, t in tensors.items()}, directory / "model.safetensors", {"format": "pt"}
    )


def token_ids(batch: int = 2, length: int = 24, vocab_size: int = SIZES["vocab_size"], seed: int = 1) -> Any:
    """Random token ids, [B, S]."""
    import torch

    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))
