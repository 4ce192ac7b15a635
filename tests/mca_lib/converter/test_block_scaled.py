"""FP8 block-scaled sources: dequantized to bf16 on load exactly as transformers does, whatever slice is asked for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mca_lib.converter.block_scaled import BlockScaled, dequantized
from mca_lib.converter.hf_source import HfSource
from mca_lib.converter.plan import TensorInfo
from mca_lib.errors import ModelError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.families.quantization import block_size
from tests.mca_lib.converter import export_ranks
from tests.mca_lib.converter.fp8 import dequantize, quantize, quantize_directory
from tests.mca_lib.models import factory_ranks

BLOCK = (16, 16)
HF = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}}


def scaled(shape: tuple[int, int], block: tuple[int, int] = BLOCK) -> tuple[BlockScaled, torch.Tensor]:
    """(the lazy tensor, its values by the slow way)."""
    weight, scale = quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)), block)
    return BlockScaled(weight, scale, shape, block), dequantize(weight, scale, block)


@pytest.fixture
def quantized(ranks: Any, tmp_path: Path) -> Path:
    ranks(1, export_ranks.make_source, tmp_path / "hf", "llama")
    quantize_directory(tmp_path / "hf")
    return tmp_path / "hf"


def test_values_are_those_of_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    lazy, slow = scaled((64, 48))
    theirs = Fp8Dequantize(None)._dequantize_one(lazy.weight, lazy.scale, torch.bfloat16)
    assert torch.equal(lazy[:], theirs)
    assert torch.equal(lazy[:], slow)


@pytest.mark.parametrize("shape", [(64, 48), (40, 23), (5, 3), (16, 17)])
@pytest.mark.parametrize("block", [(16, 16), (8, 32)])
def test_shape_need_not_divide_by_the_block(shape: tuple[int, int], block: tuple[int, int]) -> None:
    lazy, slow = scaled(shape, block)
    assert torch.equal(lazy[:], slow)


@pytest.mark.parametrize("index", [(slice(0, 20),), (slice(7, 39),), (slice(None), slice(3, 21)), (slice(9, 9),)])
def test_slice_may_start_and_end_inside_a_block(index: tuple[slice, ...]) -> None:
    lazy, slow = scaled((40, 23))
    assert torch.equal(lazy[index], slow[index])


def test_scales_are_no_tensors_of_the_model(quantized: Path) -> None:
    source = HfSource(quantized)
    assert {info.dtype for info in source.tensors.values()} == {"bfloat16"}
    assert not [name for name in source.tensors if "scale" in name]


def test_job_converts_to_the_logits_of_transformers_and_exports_bf16(
    ranks: Any, quantized: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    from mca_lib.converter.export import export_hf

    (result,) = ranks(1, export_ranks.convert, quantized, tmp_path / "mca", 1e-4)
    assert result["dtype"] == "bfloat16"
    export_hf(tmp_path / "mca", tmp_path / "back")
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    before, after = load_file(quantized / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert after.keys() == {name for name in before if "scale" not in name}
    for name, tensor in after.items():
        scale = before.get(f"{name}_scale_inv")
        assert torch.equal(tensor, before[name] if scale is None else dequantize(before[name], scale, BLOCK)), name


def test_deepseek_converts_as_its_dequantized_weights_do(ranks: Any, tmp_path: Path) -> None:
    """Experts, latent attention and multi-token prediction included; no shape divides by the block."""
    from safetensors.torch import load_file, save_file

    from mca_lib.converter.stream import convert_hf

    ranks(1, export_ranks.make_source, tmp_path / "hf", "deepseek-mtp")
    plain = (tmp_path / "hf" / "config.json").read_bytes()
    quantize_directory(tmp_path / "hf", (10, 12))
    quantized = convert_hf(tmp_path / "hf", tmp_path / "mca")
    (tmp_path / "hf" / "config.json").write_bytes(plain)
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    for name in [n for n in tensors if n.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        tensors[weight] = dequantize(tensors[weight], tensors.pop(name), (10, 12))
    save_file(tensors, path, metadata={"format": "pt"})
    plain = convert_hf(tmp_path / "hf", tmp_path / "plain")
    assert quantized["parts"]["weights"] == plain["parts"]["weights"]


def test_tensor_parallel_ranks_load_the_same_bytes_as_from_the_checkpoint(
    ranks: Any, quantized: Path, tmp_path: Path
) -> None:
    ranks(1, export_ranks.convert, quantized, tmp_path / "mca")
    for same, count in ranks(2, factory_ranks.same_from_both_formats, {"tensor": 2}, quantized, tmp_path / "mca"):
        assert same
        assert count > 20


@pytest.mark.parametrize("fmt", ["e4m3", "float8_e4m3fn", None])
def test_fp8_is_known_by_either_name(fmt: str | None) -> None:
    """Those of DeepSeek-V3 and of MiniMax-M2, and none."""
    quantization = {
        "activation_scheme": "dynamic",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    }
    assert block_size({"quantization_config": quantization | ({"fmt": fmt} if fmt else {})}) == (128, 128)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
        {"quant_method": "mxfp4"},
        {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]},
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static", "weight_block_size": [128, 128]},
        {"quant_method": "fp8", "fmt": "e4m3"},
    ],
    ids=lambda q: "-".join(str(v) for v in q.values()),
)
def test_other_quantization_is_refused_by_name(ranks: Any, tmp_path: Path, quantization: dict[str, Any]) -> None:
    ranks(1, export_ranks.make_source, tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    with pytest.raises(ModelError, match=rf"quantization_config: .*quant_method='{quantization['quant_method']}'"):
        McaModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (None, "w_scale_inv is missing"),
        (TensorInfo((2, 3), "float8_e8m0fnu"), "w_scale_inv is float8_e8m0fnu"),
        (TensorInfo((2, 2), "float32"), r"w_scale_inv is float32 \[2, 2\]; .* need float32 \[2, 3\]"),
    ],
)
def test_scale_that_does_not_fit_is_named(scale: TensorInfo | None, message: str) -> None:
    tensors = {"w": TensorInfo((32, 40), "float8_e4m3fn")} | ({"w_scale_inv": scale} if scale else {})
    with pytest.raises(ModelError, match=message):
        dequantized(tensors, HF)


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan")])
def test_scale_that_is_not_above_zero_is_named(quantized: Path, tmp_path: Path, scale: float) -> None:
    from safetensors.torch import load_file, save_file

    from mca_lib.converter.stream import convert_hf

    path, name = quantized / "model.safetensors", "model.layers.0.mlp.up_proj.weight_scale_inv"
    tensors = load_file(path)
    tensors[name][-1, 0] = scale
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"{name} holds a scale that is not above 0"):
        convert_hf(quantized, tmp_path / "mca")


def test_quantized_weights_without_a_quantization_config_are_refused(quantized: Path, tmp_path: Path) -> None:
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    (quantized / "config.json").write_text(json.dumps(config))
    from mca_lib.converter.headers import check_weights

    with pytest.raises(ModelError, match=r"of an unsupported dtype: .*float8_e4m3fn"):
        check_weights(McaModelConfig.from_pretrained(quantized), quantized)
