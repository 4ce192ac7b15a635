"""A cast to a narrower dtype that a value does not fit into is an error that names the tensor."""

from pathlib import Path

import pytest
import torch

from mca_lib.converter.casts import cast
from mca_lib.converter.export import export_hf
from mca_lib.converter.stream import convert_hf
from mca_lib.errors import ConfigError
from tests.mca_lib.converter import llama_files
from tests.mca_lib.models.factory_ranks import set_weight


@pytest.mark.parametrize(
    ("value", "stored", "wanted"),
    [
        (-1e5, torch.bfloat16, torch.float16),
        (7e4, torch.float32, torch.float16),
        (3.4e38, torch.float32, torch.bfloat16),
    ],
)
def test_value_beyond_the_largest_is_named(value: float, stored: torch.dtype, wanted: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"^x has the value \S+, \w+ ends at \S+: use another dtype"):
        cast("x", torch.tensor([0.0, value], dtype=stored), wanted)


def test_largest_value_that_fits_is_cast() -> None:
    assert cast("x", torch.tensor([65504.0]), torch.float16).item() == 65504.0


def test_what_was_infinite_before_is_not_blamed_on_the_dtype() -> None:
    with pytest.raises(ConfigError, match="x holds NaN or an infinite value"):
        cast("x", torch.tensor([float("inf")]), torch.float16)


def test_export_to_a_dtype_that_cannot_hold_a_weight_leaves_nothing(tmp_path: Path) -> None:
    llama_files.make(tmp_path / "hf")
    set_weight(tmp_path / "hf", "model.layers.1.self_attn.k_proj.weight", 1e5)
    convert_hf(tmp_path / "hf", tmp_path / "mca")
    message = r"model\.layers\.1\.self_attn\.k_proj\.weight has the value 99840, float16 ends at 65504"
    with pytest.raises(ConfigError, match=message):
        export_hf(tmp_path / "mca", tmp_path / "out", dtype="float16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "mca"]
    export_hf(tmp_path / "mca", tmp_path / "out", dtype="float32")
