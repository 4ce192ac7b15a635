"""More public hyper-parameters, as in `full_size_configs`: of models with norms, ropes or a softmax of their own."""

from typing import Any

from mca_lib.models.layout import Layout
from mca_lib.models.memory import Training

CONFIGS: dict[str, dict[str, Any]] = {
    "OLMo-2-32B": {
        "model_type": "olmo2",
        "vocab_size": 100352,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "Gemma-3-27B": {  # the language model
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
        "sliding_window": 1024,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "GPT-OSS-120B": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    },
    "MiniMax-M2": {
        "model_type": "minimax_m2",
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rotary_dim": 64,
        "max_position_embeddings": 196608,
        "rms_norm_eps": 1e-6,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
        "shared_intermediate_size": 0,
        "rope_theta": 5000000,
    },
}

LAYOUTS: dict[str, tuple[int, Layout, Training]] = {
    "OLMo-2-32B": (64, Layout(tensor=4, pipeline=4, sequence_parallel=True), Training()),
    "Gemma-3-27B": (64, Layout(tensor=8, pipeline=2, sequence_parallel=True), Training()),
    "GPT-OSS-120B": (
        128,
        Layout(tensor=2, pipeline=4, expert=16, expert_tensor=1, sequence_parallel=True),
        Training(recompute="full"),
    ),
    "MiniMax-M2": (
        256,
        Layout(
            tensor=4,
            pipeline=8,
            expert=32,
            expert_tensor=1,
            sequence_parallel=True,
            first_stage_layers=7,
            last_stage_layers=7,
        ),
        Training(),
    ),
}
