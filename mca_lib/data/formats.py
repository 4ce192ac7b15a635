"""Which files hold the rows and how their rows are laid out: LLaMA-Factory's formats, checked strictly.

    layout     row
    alpaca     {"instruction": "...", "input": "...", "output": "...", ["system", "tools", "history": [[q, a], ...]]}
    sharegpt   {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}], ["system", ...]}
    text       {"text": "..."}                                                    plain text, for pretraining
    indexed    no rows: tokens in Megatron's format, corpus.bin beside corpus.idx                 for pretraining

Rows for preference optimization (`ranking: true`) hold two answers to the same conversation:

    alpaca     {"instruction": "...", "input": "...", "chosen": "...", "rejected": "..."}
    sharegpt   {"conversations": [..., {"from": "human", "value": "..."}], "chosen": {"from": "gpt", "value": "..."},
                "rejected": {"from": "gpt", "value": "..."}}

`columns` renames the fields of a row, `tags` the keys and roles of a conversation. Where LLaMA-Factory ignores an
unknown key of `dataset_info.json` or drops what it cannot use, this module refuses it by name. A column that is not
named keeps its default if the layout cannot do without it, and is unset otherwise.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Protocol

from mca_lib.data.files import Span
from mca_lib.data.suggest import suggestion
from mca_lib.errors import ConfigError, DataError

DATASET_INFO = "dataset_info.json"

EXTENSIONS = (".json", ".jsonl", ".csv", ".parquet", ".txt")
INDEXED_EXTENSIONS = (".bin",)
PRETRAINING_LAYOUTS = ("text", "indexed")

# Column -> its default name in a row. `None`: used only when named.
COLUMNS: dict[str, dict[str, str | None]] = {
    "alpaca": {
        "prompt": "instruction",
        "query": None,
        "response": "output",
        "history": None,
        "system": None,
        "tools": None,
    },
    "sharegpt": {"messages": "conversations", "system": None, "tools": None},
    "text": {"prompt": "text"},
    "indexed": {},
}
# In place of the answer, where rows hold two.
RANKING_COLUMNS: dict[str, str | None] = {"chosen": "chosen", "rejected": "rejected"}
# Used only while no column is named at all, as LLaMA-Factory does; a row may then lack it.
ALPACA_DEFAULT_QUERY = "input"

TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}

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
UNSUPPORTED_COLUMNS = {
    "images": "media are not supported",
    "videos": "media are not supported",
    "audios": "media are not supported",
    "kto_tag": "KTO is not supported; pair each answer with another one to the same prompt, as chosen and rejected",
}


class SourceConfig(Protocol):
    """The fields of the dataset section that say where the rows are and how they look."""

    files: Sequence[str]
    dataset_dir: str | None
    names: Sequence[str]
    formatting: str
    ranking: bool
    columns: Mapping[str, str]
    tags: Mapping[str, str]
    eval_files: Sequence[str]


@dataclass(frozen=True)
class RowFormat:
    """How one row is laid out."""

    layout: str
    columns: Mapping[str, str | None]
    """Column -> name in the row; None: there is none."""
    named: frozenset[str]
    """Columns that the user named: such a column must occur in at least one row."""
    tags: Mapping[str, str]
    ranking: bool = False
    """Rows hold a chosen and a rejected answer."""


@dataclass(frozen=True)
class Source:
    """One data file and the layout of its rows."""

    path: Path
    format: RowFormat
    split: str
    """`train` or `eval`."""
    entry: str = ""
    """Name of the entry of dataset_info.json that it is a file of."""
    span: Span | None = None
    """The part of the file; None is all of it."""

    @property
    def index(self) -> Path:
        """The .idx beside a .bin."""
        return self.path.with_suffix(".idx")


def resolve_sources(config: SourceConfig, objective: str) -> list[Source]:
    """The data files of a dataset section, in the order in which they are read.

    Raises:
        ConfigError: contradictory or unknown fields or keys, or a layout that the objective cannot use.
        DataError: a file that does not exist or is of an unknown kind, or an unreadable dataset_info.json.
    """
    if bool(config.files) == bool(config.names):
        raise ConfigError("dataset.files: name data files there, or else entries of dataset_info.json in dataset.names")
    if config.files:
        row_format = _recipe_format(config, objective)
        sources = [Source(p, row_format, "train") for p in _existing(config.files, "dataset.files", row_format)]
    else:
        if config.columns or config.tags:
            raise ConfigError(f"dataset.columns: with dataset.names, columns and tags stand in {DATASET_INFO}")
        sources = [source for entry in read_entries(config) for source in _entry_sources(entry, config, objective)]
        row_format = sources[0].format
    held_out = _existing(config.eval_files, "dataset.eval_files", row_format)
    return sources + [Source(path, row_format, "eval") for path in held_out]


@dataclass(frozen=True)
class Entry:
    """One entry of dataset_info.json, its keys checked."""

    name: str
    fields: Mapping[str, Any]

    @property
    def where(self) -> str:
        return f"{DATASET_INFO}: {self.name}"


def read_entries(config: SourceConfig) -> list[Entry]:
    """The entries of dataset_info.json that `config.names` selects."""
    if config.dataset_dir is None:
        raise ConfigError(f"dataset.dataset_dir: required with dataset.names; the folder that holds {DATASET_INFO}")
    path = Path(config.dataset_dir) / DATASET_INFO
    try:
        info = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise DataError(f"dataset.dataset_dir: there is no {DATASET_INFO} in {config.dataset_dir}") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: malformed JSON at column {error.colno}: {error.msg}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(info, dict):
        raise DataError(f"{path}: holds a {type(info).__name__}; it must be an object of entries by name")
    return [_checked_entry(name, info) for name in config.names]


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
        raise ConfigError(f"{entry.where}: formatting must be a string: {', '.join(COLUMNS)}")
    for key in ("columns", "tags"):
        if not isinstance(fields.get(key, {}), dict):
            raise ConfigError(f"{entry.where}: {key} must be an object of names")
    return entry


def _entry_sources(entry: Entry, config: SourceConfig, objective: str) -> list[Source]:
    fields = entry.fields
    columns, layout = fields.get("columns", {}), fields.get("formatting", "alpaca")
    if objective == "pt" and layout == "alpaca":
        # LLaMA-Factory's way to declare plain text: an alpaca entry whose prompt column is the text.
        if "prompt" not in columns:
            raise ConfigError(f"{entry.where}: for pretraining, name the text column: columns {{prompt: …}}")
        layout, columns = "text", {"prompt": columns["prompt"]}
    ranking, tags = fields.get("ranking", False), fields.get("tags", {})
    row_format = build_format(layout, columns, tags, ranking=ranking, objective=objective, at=entry.where)
    paths = _files_of_entry(entry, Path(config.dataset_dir or ""))
    return [Source(path, row_format, "train", entry.name) for path in paths]


def _recipe_format(config: SourceConfig, objective: str) -> RowFormat:
    layout, columns = config.formatting, config.columns
    if objective == "pt" and layout == "alpaca" and "prompt" in columns:
        layout, columns = "text", {"prompt": columns["prompt"]}
    return build_format(layout, columns, config.tags, ranking=config.ranking, objective=objective, at="dataset")


def build_format(
    layout: str, columns: Mapping[str, str], tags: Mapping[str, str], *, ranking: bool, objective: str, at: str
) -> RowFormat:
    """Check a layout and its names. `at` says in messages where they stand."""
    if layout == "openai":
        raise ConfigError(
            f"{at}: formatting openai is not supported; use sharegpt with columns {{messages: messages}} and tags "
            "{role_tag: role, content_tag: content, user_tag: user, assistant_tag: assistant}"
        )
    if layout not in COLUMNS:
        raise ConfigError(f"{at}: unknown formatting {layout!r}{suggestion(layout, COLUMNS)}")
    if not isinstance(ranking, bool):
        raise ConfigError(f"{at}: ranking must be true or false")
    if ranking and objective != "dpo":
        raise ConfigError(f"{at}: ranking: true holds pairs of answers, which training.stage {objective} cannot use")
    if objective == "dpo" and not ranking:
        raise ConfigError(
            f"{at}: training.stage dpo needs pairs of answers; set ranking: true, or use training.stage sft"
        )
    if (objective == "pt") != (layout in PRETRAINING_LAYOUTS):
        remedy = "set formatting: text" if objective == "pt" else "set formatting: alpaca or sharegpt"
        raise ConfigError(f"{at}: formatting {layout} does not go with training.stage {objective}; {remedy}")
    if layout == "text" and "text" in columns:
        columns = {("prompt" if key == "text" else key): name for key, name in columns.items()}
    known = _columns(layout, ranking)
    for key, name in columns.items():
        if key in UNSUPPORTED_COLUMNS:
            raise ConfigError(f"{at}: columns.{key} is not supported: {UNSUPPORTED_COLUMNS[key]}")
        if key in RANKING_COLUMNS and not ranking:
            raise ConfigError(f"{at}: columns.{key} is for rows with ranking: true, which training.stage dpo needs")
        if key == "response" and ranking:
            raise ConfigError(f"{at}: columns.response is not for rows with ranking: true; name chosen and rejected")
        if key not in known:
            raise ConfigError(f"{at}: columns has no key {key!r} for formatting {layout}{suggestion(key, known)}")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{at}: columns.{key} must be the name of a column")
    for key, name in tags.items():
        if key not in TAGS:
            raise ConfigError(f"{at}: tags has no key {key!r}{suggestion(key, TAGS)}")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{at}: tags.{key} must be a string")
    defaults = dict(known)
    if layout == "alpaca" and not columns:
        defaults["query"] = ALPACA_DEFAULT_QUERY
    return RowFormat(layout, {**defaults, **columns}, frozenset(columns), {**TAGS, **tags}, ranking)


def _columns(layout: str, ranking: bool) -> Mapping[str, str | None]:
    if not ranking:
        return COLUMNS[layout]
    return {key: name for key, name in COLUMNS[layout].items() if key != "response"} | RANKING_COLUMNS


def _existing(files: Sequence[str], field: str, row_format: RowFormat) -> list[Path]:
    """Paths of data files, each one checked to be a readable kind."""
    paths = []
    for index, name in enumerate(files):
        path = Path(name).expanduser()
        if not path.exists():
            raise DataError(f"{field}[{index}]: there is no file {name}")
        if not path.is_file():
            raise DataError(f"{field}[{index}]: {name} is not a file")
        known = INDEXED_EXTENSIONS if row_format.layout == "indexed" else EXTENSIONS
        _check_extension(path, f"{field}[{index}]", known)
        if known == INDEXED_EXTENSIONS and not path.with_suffix(".idx").is_file():
            raise DataError(f"{field}[{index}]: there is no {path.stem}.idx beside {name}; both files are needed")
        paths.append(path)
    return paths


def _files_of_entry(entry: Entry, folder: Path) -> list[Path]:
    name = entry.fields["file_name"]
    path = folder / name
    if "\0" in name or PurePath(name).is_absolute() or ".." in PurePath(name).parts or path == folder:
        raise ConfigError(f"{entry.where}: file_name {name!r} is not below dataset_dir; put the data file there")
    if path.is_dir():
        paths = sorted(p for p in path.iterdir() if p.is_file() and p.suffix.lower() in EXTENSIONS)
        if not paths:
            raise DataError(f"{entry.where}: there is no data file ({', '.join(EXTENSIONS)}) in {path}")
        return paths
    if not path.is_file():
        raise DataError(f"{entry.where}: there is no file {path}")
    _check_extension(path, entry.where)
    return [path]


def _check_extension(path: Path, at: str, known: Sequence[str] = EXTENSIONS) -> None:
    if path.suffix.lower() not in known:
        hint = "; tokens in Megatron's format have formatting: indexed" if path.suffix in (".bin", ".idx") else ""
        raise DataError(f"{at}: {path.name} is of an unknown kind; use one of {', '.join(known)}{hint}")
