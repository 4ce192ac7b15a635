"""Experts in MXFP4: seen as the bf16 tensors that transformers makes of them, whatever slice is asked for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mca_lib.converter.hf_source import HfSource
from mca_lib.converter.mxfp4 import Mxfp4, unpacked
from mca_lib.converter.plan import TensorInfo
from mca_lib.errors import ModelError
from mca_lib.models.config import McaModelConfig
from tests.mca_lib.converter.mxfp4_files import pack_directory, random_mxfp4
from tests.mca_lib.models import peculiar_ranks

SHAPE = (3, 64, 10)


def lazy(seed: int = 0) -> Mxfp4:
    experts, inputs, outputs = SHAPE
    return Mxfp4(*random_mxfp4(experts, outputs, inputs, seed), SHAPE)


def test_values_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    ours = lazy()
    every_byte = torch.arange(256, dtype=torch.uint8).view(1, 8, 2, 16)
    scales = torch.tensor([1, 100, 120, 127, 130, 200, 250, 254] * 2, dtype=torch.uint8).view(1, 8, 2)
    for tensor in (ours, Mxfp4(every_byte, scales, (1, 64, 8))):
        theirs = convert_moe_packed_tensors(tensor.blocks, tensor.scales)
        assert torch.equal(tensor[:].view(torch.int16), theirs.view(torch.int16))


@pytest.mark.parametrize(
    "index",
    [
        (slice(1, 2),),
        (slice(0, 3), slice(5, 39)),
        (slice(2, 3), slice(None), slice(3, 7)),
        (slice(0, 1), slice(32, 64), slice(0, 1)),
        (slice(0, 1), slice(9, 9)),
    ],
)
def test_slice_may_start_and_end_inside_a_block(index: tuple[slice, ...]) -> None:
    assert torch.equal(lazy()[index], lazy()[:][index])


def test_source_is_loaded_and_exported_as_bf16(ranks: Any, tmp_path: Path) -> None:
    """At one rank and with experts spread, as transformers dequantizes it."""
    source = tmp_path / "hf"
    ranks(1, peculiar_ranks.save_with_blocks, source)
    pack_directory(source)
    with HfSource(source) as found:
        assert {info.dtype for info in found.tensors.values()} == {"bfloat16"}
        expected = {name: found.slice(name)[:].clone() for name in found.tensors}
    assert ranks(1, peculiar_ranks.differing_from_transformers, source) == [[]]
    for layout in ({}, {"expert": 2}):
        ranks(layout.get("expert", 1), peculiar_ranks.export, source, tmp_path / f"back{len(layout)}", layout)
        with HfSource(tmp_path / f"back{len(layout)}") as back:
            assert back.tensors.keys() == expected.keys()
            assert all(torch.equal(back.slice(name)[:], tensor) for name, tensor in expected.items())
        assert "quantization_config" not in json.loads((tmp_path / f"back{len(layout)}" / "config.json").read_text())


BYTES = TensorInfo((2, 8, 2, 16), "uint8")
REFUSED: dict[str, tuple[dict[str, TensorInfo], str]] = {
    "no scales": ({"x_blocks": BYTES}, "x_blocks is there, and x_scales is missing"),
    "no blocks": ({"x_scales": TensorInfo((2, 8, 2), "uint8")}, "x_scales is there, and x_blocks is missing"),
    "other scales": (
        {"x_blocks": BYTES, "x_scales": TensorInfo((2, 8, 3), "uint8")},
        r"x_blocks is uint8 \[2, 8, 2, 16\], x_scales uint8 \[2, 8, 3\]",
    ),
    "another dtype": ({"x_blocks": BYTES, "x_scales": TensorInfo((2, 8, 2), "float32")}, "x_scales float32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_do_not_fit_are_refused(case: str) -> None:
    tensors, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        unpacked(tensors)


def test_scale_that_is_not_a_number_is_refused() -> None:
    tensor = lazy()
    tensor.scales[1, 0, 0] = 255
    with pytest.raises(ModelError, match="holds a scale that is not a number"):
        tensor[1:2]


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("llama", {"quant_method": "mxfp4"}, "quant_method='mxfp4'"),
        ("gpt_oss", {"quant_method": "mxfp4", "weight_block_size": [32]}, r"weight_block_size=\[32\] of quant_method"),
    ],
)
def test_other_forms_are_refused_by_name(model_type: str, fields: dict[str, Any], message: str) -> None:
    from mca_lib.models.registry import config_from_hf
    from tests.mca_lib.models.test_registry import BASES

    with pytest.raises(ModelError, match=message):
        config_from_hf({**BASES[model_type], "quantization_config": fields})
    config = config_from_hf({**BASES["gpt_oss"], "quantization_config": {"quant_method": "mxfp4"}})
    assert isinstance(config, McaModelConfig)
