"""The weights of a Hugging Face directory, read slice by slice.

Headers say everything that a plan needs; a byte of weights is read only when a slice is asked for, and only that
slice. Pickled checkpoints are read too, with `weights_only` and memory-mapped.
"""

from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open

from mca_lib.converter.headers import check_against_index, read_header, weight_files
from mca_lib.converter.mappings import TensorSlice
from mca_lib.converter.plan import TensorInfo
from mca_lib.errors import ModelError


class HfSource:
    """Tensors of a Hugging Face directory by name.

    Raises ModelError on construction when files are missing, truncated, or disagree with the index.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.tensors: dict[str, TensorInfo] = {}
        self._file: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        expected = weight_files(self.directory)
        for path, names in expected.items():
            found = _pickle_header(self._pickle(path)) if path.suffix == ".bin" else read_header(path)
            check_against_index(path, names, found)
            for name, info in found.items():
                if name in self._file:
                    raise ModelError(f"{path}: {name} is also in {self._file[name].name}")
                self._file[name], self.tensors[name] = path, info

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def slice(self, name: str) -> TensorSlice:
        """The tensor, to be indexed."""
        path = self._file[name]
        if path.suffix == ".bin":
            return self._pickle(path)[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path].get_slice(name)

    def file(self, name: str) -> Path:
        """The file that holds the tensor."""
        return self._file[name]

    def _pickle(self, path: Path) -> dict[str, torch.Tensor]:
        if path not in self._open:
            try:
                self._open[path] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except Exception as e:
                raise ModelError(f"{path}: not a readable PyTorch checkpoint ({type(e).__name__}: {e})") from e
        return self._open[path]


def _pickle_header(tensors: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    return {n: TensorInfo(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}
