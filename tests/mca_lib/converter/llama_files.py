"""Llama checkpoints of any size with random weights, written without transformers and with one tensor in memory."""

import json
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def make(directory: Path, max_shard_bytes: int = 5_000_000_000, **changes: Any) -> int:
    """Write one whose config differs from CONFIG by `changes`; returns the bytes of the weights."""
    import torch

    from mca_lib.converter.export import hf_slots
    from mca_lib.converter.safetensors_writer import ShardedWriter
    from mca_lib.models.registry import config_from_hf

    directory.mkdir(parents=True, exist_ok=True)
    hf = {**CONFIG, **changes}
    (directory / "config.json").write_text(json.dumps(hf))
    generator = torch.Generator().manual_seed(0)
    with ShardedWriter(directory, hf_slots(config_from_hf(hf), "bfloat16"), max_shard_bytes) as writer:
        for name, slot in writer.slots.items():
            writer.write(name, torch.randn(slot.shape, generator=generator).mul_(0.02).to(slot.dtype))
    return writer.total_bytes
