"""The weights of a Hugging Face directory, read slice by slice.

Headers say everything that a plan needs; a byte of weights is read only when a slice is asked for, and only that
slice. Quantized tensors show as what they stand for (`block_scaled`). Pickled checkpoints are read too, with
`weights_only` and memory-mapped.
"""

from pathlib import Path
from typing import IO, Any, Self

import torch

from mca_lib.converter.block_scaled import BlockScaled, block_size, dequantized, scale_name
from mca_lib.converter.file_tensor import FileTensor, ReadCounter
from mca_lib.converter.headers import StoredTensor, check_against_index, read_layout, weight_files
from mca_lib.converter.mapping import TensorSlice
from mca_lib.converter.mxfp4 import BLOCKS, SCALES, Mxfp4
from mca_lib.converter.plan import TensorInfo
from mca_lib.converter.stacked import StackedPart, number, whole
from mca_lib.converter.stacked_experts import expert_parts, stacks_experts
from mca_lib.errors import ModelError
from mca_lib.models.config import read_json


class HfSource:
    """Tensors of a Hugging Face directory by name; threads may share one.

    Raises ModelError on construction when files are missing, truncated, or disagree with the index.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._stored: dict[str, StoredTensor] = {}
        self._file: dict[str, Path] = {}
        self._open: dict[Path, IO[bytes]] = {}
        self._pickles: dict[Path, dict[str, torch.Tensor]] = {}
        self._counter = ReadCounter()
        hf = _config(self.directory)
        for path, names in weight_files(self.directory).items():
            found = self._pickle_layout(path) if path.suffix == ".bin" else read_layout(path)
            check_against_index(path, names, {name: stored.info for name, stored in found.items()})
            if path.suffix != ".bin" and stacks_experts(hf):
                found = _of_each_expert(found)
            for name, stored in found.items():
                if name in self._file:
                    raise ModelError(f"{path}: {name} is also in {self._file[name].name}")
                self._file[name], self._stored[name] = path, stored
        self._block = block_size(hf)
        self.tensors: dict[str, TensorInfo] = dequantized({n: s.info for n, s in self._stored.items()}, hf)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()
        self._pickles.clear()

    @property
    def bytes_read(self) -> int:
        """Of weights, from safetensors files; headers do not count."""
        return self._counter.bytes

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor, or of a part of a stacked one (`stacked`)."""
        return getattr(torch, self.tensors[whole(name)].dtype)

    def slice(self, name: str) -> TensorSlice:
        """The tensor, or the part of a stacked one, to be indexed."""
        if (part := number(name)) is not None:
            return StackedPart(self.slice(whole(name)), part)
        if name not in self._stored:
            return Mxfp4(self._raw(name + BLOCKS), self._raw(name + SCALES), self.tensors[name].shape, name)
        info = self._stored[name].info
        if self.tensors[name] == info:
            return self._raw(name)
        return BlockScaled(self._raw(name), self._raw(scale_name(name)), info.shape, self._block, name)

    def file(self, name: str) -> Path:
        """The file that holds the tensor."""
        name = whole(name)
        return self._file[name if name in self._file else name + BLOCKS]

    def _raw(self, name: str) -> TensorSlice:
        path, stored = self._file[name], self._stored[name]
        if path.suffix == ".bin":
            return self._pickle(path)[name]
        if path not in self._open:
            self._open[path] = path.open("rb", buffering=0)
        dtype = getattr(torch, stored.info.dtype)
        return FileTensor(self._open[path], path, stored.start, stored.info.shape, dtype, self._counter)

    def _pickle(self, path: Path) -> dict[str, torch.Tensor]:
        if path not in self._pickles:
            try:
                found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except Exception as e:
                # Of torch's advice, which fills a page, the first line says what was wrong.
                cause = str(e).partition("\n")[0]
                raise ModelError(f"{path}: not a readable PyTorch checkpoint ({type(e).__name__}: {cause})") from e
            _check_names_and_tensors(path, found)
            self._pickles[path] = found
        return self._pickles[path]

    def _pickle_layout(self, path: Path) -> dict[str, StoredTensor]:
        return {
            name: StoredTensor(TensorInfo(tuple(t.shape), str(t.dtype).removeprefix("torch.")), 0)
            for name, t in self._pickle(path).items()
        }


def _of_each_expert(found: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, with those of each expert in the place of stacks."""
    result: dict[str, StoredTensor] = {}
    for name, stored in found.items():
        parts = list(expert_parts(name, stored.info))
        size = getattr(torch, stored.info.dtype).itemsize if parts else 0
        result |= {p.name: StoredTensor(p.info, stored.start + p.start * size) for p in parts} or {name: stored}
    return result


def _check_names_and_tensors(path: Path, found: object) -> None:
    """Raise ModelError unless a pickle holds what transformers loads: names and tensors, nothing around them."""
    if not isinstance(found, dict):
        raise ModelError(f"{path}: holds {type(found).__name__}, not names and tensors; save the model's state_dict")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ModelError(
                f"{path}: {name!r} is {type(value).__name__}, not a tensor; save the model's state_dict itself, with "
                "nothing around it"
            )


def _config(directory: Path) -> dict[str, Any]:
    """config.json; empty where there is none, since weights alone are a source too."""
    path = directory / "config.json"
    return read_json(path, ModelError) if path.is_file() else {}
