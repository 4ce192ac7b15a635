"""MXFP4 checkpoints as GPT-OSS stores them, made from others."""

import json
from pathlib import Path

import torch


def random_mxfp4(experts: int, outputs: int, inputs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(blocks, scales) of random values."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
    return blocks, scales


def pack_directory(directory: Path) -> None:
    """Give the experts of a directory in place random weights in MXFP4, and cast the rest to bf16."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = random_mxfp4(experts, outputs, inputs, len(tensors))
        else:
            tensors[name] = tensor.to(torch.bfloat16)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (directory / "config.json").write_text(json.dumps(config))
