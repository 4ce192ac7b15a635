"""Experts stored stacked, as [inputs, outputs], with gate and up in turns."""

from typing import Any

import pytest
import torch

from mca_lib.converter.plan import TensorInfo, make_plan
from mca_lib.converter.safetensors_writer import ShardedWriter, Slot
from mca_lib.converter.stacked import StackedPart, number, part_names, stacked_shapes, whole
from mca_lib.converter.transposed import InterleavedMLP, TransposedRow
from mca_lib.errors import ModelError
from mca_lib.models.registry import config_from_hf
from mca_lib.verification.full_size import table_tensors
from tests.mca_lib.models.test_registry import BASES

CONFIG = config_from_hf({**BASES["gpt_oss"], "intermediate_size": 6, "hidden_size": 8})
FFN, HIDDEN = "moe.ffn_hidden_size", "hidden_size"
ROWS = [
    InterleavedMLP("m", "h", (FFN, HIDDEN)),
    InterleavedMLP("m", "h", (FFN,)),
    TransposedRow("m", "h", (HIDDEN, FFN)),
]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_of_ranks_are_the_whole_and_go_back(row: Any, size: int) -> None:
    (shape,) = row.hf_shapes(CONFIG)
    stored = torch.randn(shape)
    shares = [row.to_mca([stored], CONFIG, rank, size) for rank in range(size)]
    assert all(tuple(s.shape) == row.local_shape(CONFIG, r, size) for r, s in enumerate(shares))
    if isinstance(row, TransposedRow):
        whole_tensor = torch.cat(shares, dim=1)
    else:
        whole_tensor = torch.cat([half for i in range(2) for half in (s.chunk(2)[i] for s in shares)])
    assert torch.equal(whole_tensor, row.to_mca([stored], CONFIG))
    assert torch.equal(row.to_hf(whole_tensor, CONFIG)[0], stored)


def test_gate_and_up_are_what_transformers_takes_them_for() -> None:
    stored, x = torch.randn(8, 12), torch.randn(3, 8)
    gate, up = (x @ InterleavedMLP("m", "h", (FFN, HIDDEN)).to_mca([stored], CONFIG).T).chunk(2, dim=-1)
    both = x @ stored
    assert torch.allclose(gate, both[..., ::2], atol=1e-5)
    assert torch.allclose(up, both[..., 1::2], atol=1e-5)


def test_names_of_parts() -> None:
    assert (whole("a.b[12]"), number("a.b[12]"), whole("a.b"), number("a.b")) == ("a.b", 12, "a.b", None)
    assert stacked_shapes({"x[0]": (3, 4), "y": (5,), "x[1]": (3, 4)}) == {"x": (2, 3, 4), "y": (5,)}
    assert part_names({"x": (2, 3), "y": (5,)}, ["x[0]", "y"]) == {"x": ["x[0]", "x[1]"]}
    assert torch.equal(StackedPart(torch.arange(24).view(2, 3, 4), 1)[0:2, 1:3], torch.tensor([[13, 14], [17, 18]]))


def stored_tensors() -> dict[str, TensorInfo]:
    shapes = {name: info.shape for name, info in table_tensors(CONFIG).items()}
    return {name: TensorInfo(shape, "bfloat16") for name, shape in stacked_shapes(shapes).items()}


@pytest.mark.parametrize(
    ("experts", "message"),
    [(3, r"missing: model\.layers\.0\.mlp\.experts\.down_proj\[3\]"), (5, r"not used by the model: .*down_proj\[4\]")],
)
def test_stack_of_another_size_is_refused(experts: int, message: str) -> None:
    make_plan(CONFIG, stored_tensors())
    name = "model.layers.0.mlp.experts.down_proj"
    changed = stored_tensors() | {name: TensorInfo((experts, 6, 8), "bfloat16")}
    with pytest.raises(ModelError, match=message):
        make_plan(CONFIG, changed)


def test_parts_are_written_once_each(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    slots, parts = {"x": Slot((2, 3), torch.float32), "y": Slot((1,), torch.float32)}, {"x": ["x[0]", "x[1]"]}
    with ShardedWriter(tmp_path, slots, 10**6, parts) as writer:
        writer.write("x[1]", torch.ones(3))
        writer.write("y", torch.zeros(1))
        with pytest.raises(RuntimeError, match=r"x\[1\]: written twice"):
            writer.write("x[1]", torch.ones(3))
        writer.write("x[0]", torch.zeros(3))
    assert load_file(tmp_path / "model.safetensors")["x"].tolist() == [[0.0] * 3, [1.0] * 3]
    (tmp_path / "model.safetensors").unlink()
    writer = ShardedWriter(tmp_path, slots, 10**6, parts)
    writer.write("x[1]", torch.ones(3))
    writer.write("y", torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"never written: \['x\[0\]'"):
        writer.__exit__(None)
