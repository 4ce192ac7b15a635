"""FP8 weights with one scale per block, as DeepSeek-V3 stores them, seen as the bf16 tensors that they stand for.

    X.weight            F8_E4M3  [rows, columns]
    X.weight_scale_inv  F32      [ceil(rows / block rows), ceil(columns / block columns)]

    value = float32(weight) * float32(scale of its block), rounded to bf16

Everything above the file sees the bf16 tensor alone: the plan, the slices, the config. Importing this needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mca_lib.converter.mxfp4 import unpacked
from mca_lib.converter.plan import TensorInfo
from mca_lib.errors import ModelError
from mca_lib.models.families.quantization import block_size, is_mxfp4

if TYPE_CHECKING:
    import torch

    from mca_lib.converter.mapping import TensorSlice

DTYPE = "bfloat16"
"""Of a dequantized tensor."""
_WEIGHT, _SCALE = "float8_e4m3fn", "float32"
_SUFFIX = "_scale_inv"


def dequantized(tensors: Mapping[str, TensorInfo], hf: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """The tensors of a directory as they are after dequantization, without the scales.

    Raises:
        ModelError: a quantized tensor lacks its scale, or a scale has another shape or dtype than its tensor needs.
    """
    block = block_size(hf)
    if is_mxfp4(hf):
        return unpacked(tensors)
    if block is None:
        return dict(tensors)
    result = {}
    for name, info in tensors.items():
        if name.endswith(_SUFFIX) and name.removesuffix(_SUFFIX) in tensors:
            continue
        result[name] = info
        if info.dtype == _WEIGHT:
            _check_scale(name, info, tensors.get(name + _SUFFIX), block)
            result[name] = TensorInfo(info.shape, DTYPE)
        elif name + _SUFFIX in tensors:
            raise ModelError(f"{name} has a scale, but its dtype is {info.dtype} instead of {_WEIGHT}")
    return result


def scale_name(name: str) -> str:
    """The tensor that holds the scales of a quantized one."""
    return name + _SUFFIX


def _check_scale(name: str, weight: TensorInfo, scale: TensorInfo | None, block: tuple[int, int]) -> None:
    if scale is None:
        raise ModelError(f"{name} is {_WEIGHT} and {scale_name(name)} is missing")
    if len(weight.shape) != 2:
        raise ModelError(f"{name} is {_WEIGHT} with shape {list(weight.shape)}; blocks are of matrices")
    expected = tuple(-(-n // b) for n, b in zip(weight.shape, block, strict=True))
    if (scale.shape, scale.dtype) != (expected, _SCALE):
        raise ModelError(
            f"{scale_name(name)} is {scale.dtype} {list(scale.shape)}; blocks of {list(block)} in "
            f"{list(weight.shape)} need {_SCALE} {list(expected)}"
        )


@dataclass(frozen=True)
class BlockScaled:
    """A quantized tensor that gives bf16 slices, which may start and end inside of a block."""

    weight: "TensorSlice"
    scale: "TensorSlice"
    shape: tuple[int, int]
    block: tuple[int, int]
    name: str = "the tensor"

    @property
    def dtype(self) -> "torch.dtype":
        import torch

        return torch.bfloat16

    def __getitem__(self, index: object) -> "torch.Tensor":
        import torch

        from mca_lib.converter.file_tensor import bounds

        value = torch.empty([stop - start for start, stop in bounds(index, self.shape)], dtype=self.dtype)
        self.read_into(value, index)
        return value

    def read_into(self, destination: "torch.Tensor", index: object) -> None:
        """One row of blocks at a time, so that nothing of the tensor's size is made.

        Raises ModelError on a scale that is not above 0: its block would lose its values or its signs.
        """
        import torch

        from mca_lib.converter.file_tensor import bounds

        (top, bottom), (left, right) = bounds(index, self.shape)
        rows, columns = self.block
        across = slice(left // columns, -(-right // columns))
        offset = left % columns
        for band in range(top // rows, -(-bottom // rows)):
            start, stop = max(top, band * rows), min(bottom, (band + 1) * rows)
            scale = self.scale[band : band + 1, across][0]
            if not bool((scale > 0).all()):
                raise ModelError(f"{scale_name(self.name)} holds a scale that is not above 0; fetch the model again")
            scale = scale.repeat_interleave(columns)[offset : offset + right - left]
            values = self.weight[start:stop, left:right].to(torch.float32)
            destination[start - top : stop - top] = values.mul_(scale)
