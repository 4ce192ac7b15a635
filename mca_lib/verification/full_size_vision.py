"""Public hyper-parameters of vision-language models of full size, and a layout for each. Data only."""

from typing import Any

from mca_lib.models.layout import Layout
from mca_lib.models.memory import Training

_TOKENS = {"image_token_id": 151655, "video_token_id": 151656}
_MROPE = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]}

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2-VL-72B": {
        "model_type": "qwen2_vl",
        **_TOKENS,
        "text_config": {
            "vocab_size": 152064,
            "hidden_size": 8192,
            "intermediate_size": 29568,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_parameters": _MROPE,
        },
        "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "hidden_size": 8192},
    },
    "Qwen2.5-VL-7B": {
        "model_type": "qwen2_5_vl",
        **_TOKENS,
        "text_config": {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6,
            "rope_parameters": _MROPE,
        },
        "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
    },
    "Qwen3-VL-4B": {
        "model_type": "qwen3_vl",
        **_TOKENS,
        "tie_word_embeddings": True,
        "text_config": {
            "vocab_size": 151936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000000,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "out_hidden_size": 2560,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    },
}

LAYOUTS: dict[str, tuple[int, Layout, Training]] = {
    "Qwen2-VL-72B": (64, Layout(tensor=8, pipeline=4, sequence_parallel=True), Training(recompute="full")),
    "Qwen2.5-VL-7B": (8, Layout(tensor=4, sequence_parallel=True), Training()),
    "Qwen3-VL-4B": (8, Layout(tensor=2, sequence_parallel=True), Training()),
}
