"""Configs of the families' tiny models, with every feature of the family's table on. Data only."""

from typing import Any

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

# Of heads of 8 three quarters rotate; rows of 120 tokens are longer than 40.
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.3, 1.7],
    "long_factor": [1.5, 2.5, 6.0],
}

# Rows have 120 tokens: every window cuts most of them.
WINDOW = {"use_sliding_window": True, "sliding_window": 17}

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

# Two value heads to a key head, all sizes different; of a head of 16 channels 8 rotate.
DELTA_NETS = {
    "head_dim": 16,
    "attention_bias": True,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": YARN_ROPE | {"partial_rotary_factor": 0.5},
}

IMAGE_TOKENS = {"image_token_id": 1024, "video_token_id": 1025}
PATCHES = {"num_heads": 2, "patch_size": 4, "initializer_range": 0.2}

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
    "phi3": {
        "sliding_window": 17,
        "original_max_position_embeddings": 40,
        "rope_parameters": LONG_ROPE | {"partial_rotary_factor": 0.75},
    },
    "minimax_m2": {
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "rotary_dim": 12,
        "rope_parameters": YARN_ROPE,
    },
    "seed_oss": {
        "head_dim": 12,
        "attention_out_bias": True,
        "mlp_bias": True,
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
    "gemma3_text": {
        "head_dim": 12,
        "attention_bias": True,
        "query_pre_attn_scalar": 9,
        "sliding_window": 17,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": LINEAR_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
        },
    },
    "qwen2_vl": {
        **IMAGE_TOKENS,
        "text_config": {**WINDOW, "max_window_layers": 2, "rope_parameters": YARN_ROPE | {"mrope_section": [1, 2, 1]}},
        "vision_config": {**PATCHES, "depth": 2, "embed_dim": 24, "mlp_ratio": 2, "hidden_size": 32},
    },
    "qwen2_5_vl": {
        **IMAGE_TOKENS,
        "tie_word_embeddings": True,
        "text_config": {**WINDOW, "max_window_layers": 3, "rope_parameters": YARN_ROPE | {"mrope_section": [2, 1, 1]}},
        "vision_config": {
            **PATCHES,
            "depth": 3,
            "hidden_size": 24,
            "intermediate_size": 36,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {
        **IMAGE_TOKENS,
        "text_config": {
            "head_dim": 12,
            "attention_bias": True,
            "rope_parameters": YARN_ROPE | {"mrope_section": [2, 2, 2], "mrope_interleaved": True},
        },
        "vision_config": {
            **PATCHES,
            "depth": 3,
            "hidden_size": 24,
            "intermediate_size": 36,
            "out_hidden_size": 32,
            "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0, 2],
        },
    },
    "gpt_oss": {
        "head_dim": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 17,
        "swiglu_limit": 1.5,
        "rope_parameters": YARN_ROPE | {"truncate": False},
    },
    "olmo2": {"head_dim": 12, "attention_bias": True, "rope_parameters": LLAMA3_ROPE},
    "qwen3_next": {
        **EXPERTS,
        **DELTA_NETS,
        "num_experts": 8,
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
        "shared_expert_intermediate_size": 24,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention"],
    },
    "qwen3_5_text": {**DELTA_NETS, "tie_word_embeddings": True},
    "qwen3_5_moe_text": {
        **EXPERTS,
        **DELTA_NETS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        "mtp_num_hidden_layers": 1,
    },
    "glm4_moe": {
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
        "rope_parameters": YARN_ROPE | {"partial_rotary_factor": 0.75, "attention_factor": 0.7},
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
