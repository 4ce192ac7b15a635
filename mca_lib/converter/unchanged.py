"""Was a model's directory left alone while it was read? Otherwise what was read may be a mixture of two models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from mca_lib.checkpoint.side_files import side_files
from mca_lib.errors import ModelError

type _Stamp = tuple[int, int, int]
"""Inode, bytes, time of the last change in ns."""

_READ = ("*.safetensors", "*.bin", "*.json")


@dataclass(frozen=True)
class Stamps:
    """How the files of a model's directory stood at one moment."""

    directory: Path
    files: dict[Path, _Stamp]

    @classmethod
    def of(cls, directory: str | Path) -> Self:
        """To be taken before the first file is read."""
        return cls(Path(directory), _stamps(Path(directory)))

    def check(self) -> None:
        """Raise ModelError, naming a file, when one was written, replaced, added or removed since."""
        now = _stamps(self.directory)
        if changed := sorted(path for path in self.files.keys() | now.keys() if self.files.get(path) != now.get(path)):
            raise ModelError(
                f"{self.directory}: {changed[0]} changed while the model was read; run again when nothing writes there"
            )


def _stamps(directory: Path) -> dict[Path, _Stamp]:
    found = {path.relative_to(directory) for pattern in _READ for path in directory.glob(pattern) if path.is_file()}
    stamps = {}
    for name in found | set(side_files(directory)):
        status = (directory / name).stat()
        stamps[name] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return stamps
