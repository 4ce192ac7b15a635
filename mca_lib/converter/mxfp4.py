"""Experts in MXFP4, as GPT-OSS stores them, seen as the bf16 tensors that they stand for.

    X_blocks    U8 [E, outputs, inputs / 32, 16]    two values of 4 bits a byte, the first in the low half
    X_scales    U8 [E, outputs, inputs / 32]        exponent of each block of 32, plus 127

    X           bf16 [E, inputs, outputs]           value x 2^(scale - 127), exact in bf16

https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf, section 5.3.3; the transposition
is transformers' (`convert_moe_packed_tensors`). Importing this needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mca_lib.converter.plan import TensorInfo
from mca_lib.errors import ModelError

if TYPE_CHECKING:
    import torch

    from mca_lib.converter.mapping import TensorSlice

BLOCKS, SCALES = "_blocks", "_scales"
_BYTE, _DTYPE = "uint8", "bfloat16"
_BLOCK, _BLOCK_BYTES = 32, 16
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the low three bits (E2M1); the fourth is the sign."""
_BIAS, _NOT_A_NUMBER = 127, 255


def unpacked(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors of a directory with bf16 ones in the place of blocks and scales.

    Raises:
        ModelError: blocks or scales lack the other, or have a shape or dtype that does not fit.
    """
    result = {}
    for name, info in tensors.items():
        if name.endswith(BLOCKS):
            base = name.removesuffix(BLOCKS)
            result[base] = TensorInfo(_shape(base, info, tensors.get(base + SCALES)), _DTYPE)
        elif name.endswith(SCALES):
            if name.removesuffix(SCALES) + BLOCKS not in tensors:
                raise ModelError(f"{name} is there, and {name.removesuffix(SCALES)}{BLOCKS} is missing")
        else:
            result[name] = info
    return result


def _shape(name: str, blocks: TensorInfo, scales: TensorInfo | None) -> tuple[int, int, int]:
    if scales is None:
        raise ModelError(f"{name}{BLOCKS} is there, and {name}{SCALES} is missing")
    fits = len(blocks.shape) == 4 and blocks.shape[3] == _BLOCK_BYTES and scales.shape == blocks.shape[:3]
    if not fits or (blocks.dtype, scales.dtype) != (_BYTE, _BYTE):
        raise ModelError(
            f"{name}{BLOCKS} is {blocks.dtype} {list(blocks.shape)}, {name}{SCALES} {scales.dtype} "
            f"{list(scales.shape)}; MXFP4 has {_BYTE} [experts, outputs, inputs / {_BLOCK}, {_BLOCK_BYTES}], and its "
            "scales are that without the last size"
        )
    experts, outputs, groups, _ = blocks.shape
    return experts, groups * _BLOCK, outputs


@dataclass(frozen=True)
class Mxfp4:
    """Blocks and scales that give bf16 slices, which may start and end inside of a block."""

    blocks: "TensorSlice"
    scales: "TensorSlice"
    shape: tuple[int, int, int]
    name: str = "the tensor"

    @property
    def dtype(self) -> "torch.dtype":
        import torch

        return torch.bfloat16

    def __getitem__(self, index: object) -> "torch.Tensor":
        """Raises ModelError on a scale that is not a number."""
        import torch

        from mca_lib.converter.file_tensor import bounds

        experts, inputs, outputs = bounds(index, self.shape)
        groups = slice(inputs[0] // _BLOCK, -(-inputs[1] // _BLOCK))
        at = (slice(*experts), slice(*outputs), groups)
        bytes_EOGB, scales_EOG = self.blocks[at], self.scales[at]
        if bool((scales_EOG == _NOT_A_NUMBER).any()):
            raise ModelError(f"{self.name}{SCALES} holds a scale that is not a number; fetch the model again")
        values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.float32)
        nibbles_EOGV = torch.stack([bytes_EOGB & 15, bytes_EOGB >> 4], dim=-1).flatten(-2)
        scaled_EOGV = torch.ldexp(values[nibbles_EOGV.int()], scales_EOG.int()[..., None] - _BIAS)
        first = groups.start * _BLOCK
        whole_EOI = scaled_EOGV.to(torch.bfloat16).flatten(-2)
        return whole_EOI[..., inputs[0] - first : inputs[1] - first].transpose(-1, -2)
