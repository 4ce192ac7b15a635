"""LLaMA-Factory's dataset_info.json: entries by name, each with its data files and how their rows are laid out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from mca_lib.data.suggest import suggestion
from mca_lib.errors import ConfigError, DataError

DATASET_INFO = "dataset_info.json"

EXTENSIONS = (".json", ".jsonl", ".csv", ".parquet", ".txt")
INDEXED_EXTENSIONS = (".bin",)

# Keys of an entry of dataset_info.json: used, and known to LLaMA-Factory but of no use here (with what to do).
ENTRY_KEYS = ("file_name", "formatting", "ranking", "columns", "tags")
UNSUPPORTED_ENTRY_KEYS = {
    "hf_hub_url": "download the data set and name its file in file_name",
    "ms_hub_url": "download the data set and name its file in file_name",
    "om_hub_url": "download the data set and name its file in file_name",
    "script_url": "data set scripts are not run; write a data file and name it in file_name",
    "cloud_file_name": "download the file and name it in file_name",
    "num_samples": "use dataset.max_rows",
    "subset": "name a data file in file_name",
    "split": "name a data file in file_name",
    "folder": "name a data file in file_name",
}


@dataclass(frozen=True)
class Entry:
    """One entry of dataset_info.json, its keys checked."""

    name: str
    fields: Mapping[str, Any]

    @property
    def where(self) -> str:
        return f"{DATASET_INFO}: {self.name}"

    def files(self, folder: Path) -> list[Path]:
        """Its data files, in the order in which they are read."""
        name = self.fields["file_name"]
        path = folder / name
        if "\0" in name or PurePath(name).is_absolute() or ".." in PurePath(name).parts or path == folder:
            raise ConfigError(f"{self.where}: file_name {name!r} is not below dataset_dir; put the data file there")
        if path.is_dir():
            paths = sorted(p for p in path.iterdir() if p.is_file() and p.suffix.lower() in EXTENSIONS)
            if not paths:
                raise DataError(f"{self.where}: there is no data file ({', '.join(EXTENSIONS)}) in {path}")
            return paths
        if not path.is_file():
            raise DataError(f"{self.where}: there is no file {path}")
        check_extension(path, self.where)
        return [path]


def read_entries(dataset_dir: str | None, names: Sequence[str]) -> list[Entry]:
    """The named entries. Raises ConfigError or DataError."""
    if dataset_dir is None:
        raise ConfigError(f"dataset.dataset_dir: required with dataset.names; the folder that holds {DATASET_INFO}")
    path = Path(dataset_dir) / DATASET_INFO
    try:
        info = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise DataError(f"dataset.dataset_dir: there is no {DATASET_INFO} in {dataset_dir}") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: malformed JSON at column {error.colno}: {error.msg}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(info, dict):
        raise DataError(f"{path}: holds a {type(info).__name__}; it must be an object of entries by name")
    return [_checked_entry(name, info) for name in names]


def _checked_entry(name: str, info: Mapping[str, Any]) -> Entry:
    if name not in info:
        raise ConfigError(f"dataset.names: {name!r} is not in {DATASET_INFO}{suggestion(name, info)}")
    fields = info[name]
    entry = Entry(name, fields)
    if not isinstance(fields, dict):
        raise ConfigError(f"{entry.where}: must be an object with file_name, not a {type(fields).__name__}")
    for key in fields:
        if key in UNSUPPORTED_ENTRY_KEYS:
            raise ConfigError(f"{entry.where}: {key} is not supported; {UNSUPPORTED_ENTRY_KEYS[key]}")
        if key not in ENTRY_KEYS:
            raise ConfigError(f"{entry.where}: unknown key {key!r}{suggestion(key, ENTRY_KEYS)}")
    if not isinstance(fields.get("file_name"), str) or not fields["file_name"].strip():
        raise ConfigError(f"{entry.where}: file_name is missing; name the data file, relative to dataset_dir")
    if not isinstance(fields.get("formatting", ""), str):
        raise ConfigError(f"{entry.where}: formatting must be a string")
    for key in ("columns", "tags"):
        if not isinstance(fields.get(key, {}), dict):
            raise ConfigError(f"{entry.where}: {key} must be an object of names")
    return entry


def check_extension(path: Path, at: str, known: Sequence[str] = EXTENSIONS) -> None:
    """Raises DataError for a data file of another kind."""
    if path.suffix.lower() not in known:
        hint = "; tokens in Megatron's format have formatting: indexed" if path.suffix in (".bin", ".idx") else ""
        raise DataError(f"{at}: {path.name} is of an unknown kind; use one of {', '.join(known)}{hint}")
