"""FP8 checkpoints as DeepSeek-V3 stores them, made from others."""

import json
from pathlib import Path

import torch

LARGEST = 448.0
"""Of float8_e4m3fn."""


def quantize(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight in FP8, scale of each block), block by block."""
    rows, columns = block
    quantized = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale[i, j] = weight[at].float().abs().max() / LARGEST
            quantized[at] = (weight[at].float() / scale[i, j]).to(torch.float8_e4m3fn)
    return quantized, scale


def dequantize(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Element by element: what every faster way must give."""
    value = torch.empty(weight.shape)
    for i in range(weight.shape[0]):
        for j in range(weight.shape[1]):
            value[i, j] = weight[i, j].float() * scale[i // block[0], j // block[1]]
    return value.to(torch.bfloat16)


def quantize_directory(directory: Path, block: tuple[int, int] = (16, 16), **changes: object) -> None:
    """Quantize the matrices of the layers in place; `changes` go into quantization_config."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        if name.endswith("_proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = quantize(tensor, block)
        else:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config))
