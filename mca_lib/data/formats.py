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

Rows with images name a column with their paths, a list in the order of the marks `<image>` in the text; a path is
relative to `media_dir`, else to the folder of the data file (with dataset_info.json: to its folder).

`columns` renames the fields of a row, `tags` the keys and roles of a conversation. Where LLaMA-Factory ignores an
unknown key of `dataset_info.json` or drops what it cannot use, this module refuses it by name. A column that is not
named keeps its default if the layout cannot do without it, and is unset otherwise.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from mca_lib.data.dataset_info import DATASET_INFO, EXTENSIONS, INDEXED_EXTENSIONS, Entry, check_extension, read_entries
from mca_lib.data.files import Span
from mca_lib.data.suggest import suggestion
from mca_lib.errors import ConfigError, DataError

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
        "images": None,
    },
    "sharegpt": {"messages": "conversations", "system": None, "tools": None, "images": None},
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

UNSUPPORTED_COLUMNS = {
    "videos": "images are, and other media are not",
    "audios": "images are, and other media are not",
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
    media_dir: Path | None = None
    """What paths of images are relative to; None: the file's folder."""

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
        sources = [
            source
            for entry in read_entries(config.dataset_dir, config.names)
            for source in _entry_sources(entry, config, objective)
        ]
        row_format = sources[0].format
    held_out = _existing(config.eval_files, "dataset.eval_files", row_format)
    sources += [Source(path, row_format, "eval") for path in held_out]
    media = getattr(config, "media_dir", None)
    if media and not Path(media).expanduser().is_dir():
        raise ConfigError(f"dataset.media_dir: {media} is no folder")
    folder = media or (config.dataset_dir if config.names else None)
    return [replace(source, media_dir=Path(folder).expanduser()) for source in sources] if folder else sources


def shows_images(sources: Iterable[Source]) -> bool:
    """Whether their rows can have images."""
    return any(source.format.columns.get("images") for source in sources)


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
    paths = entry.files(Path(config.dataset_dir or ""))
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
        if key == "images" and ranking:
            raise ConfigError(f"{at}: columns.images: pairs of answers about images are not supported; leave it out")
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
        check_extension(path, f"{field}[{index}]", known)
        if known == INDEXED_EXTENSIONS and not path.with_suffix(".idx").is_file():
            raise DataError(f"{field}[{index}]: there is no {path.stem}.idx beside {name}; both files are needed")
        paths.append(path)
    return paths
