"""Rows of data files become conversations; a row that cannot is counted by reason and named by file and line.

This is all that can be said about the data without a tokenizer, so it runs before anything expensive, in a process
that imports neither torch nor LLaMA-Factory: about 100 MB/s, in constant memory (a JSON array is held as text).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from mca_lib.data.alignment import Sample, UnusableRow, parse_row
from mca_lib.data.files import describe_place, read_rows
from mca_lib.data.formats import Source, SourceConfig, resolve_sources
from mca_lib.data.suggest import suggestion
from mca_lib.data.templates import check_template, template_names
from mca_lib.errors import ConfigError, DataError

__all__ = ["BadRow", "Sample", "Summary", "read_samples", "template_names", "validate_sources"]

MAX_NAMED_ROWS = 20
"""So many bad rows are named in a summary; all are counted."""


class BadRow(NamedTuple):
    """A row that cannot be used."""

    reason: str
    """What the row is counted under."""
    detail: str
    """What else helps to find the mistake."""
    where: str


@dataclass(frozen=True)
class Summary:
    """What the data files hold."""

    rows: int
    kept: Mapping[str, int]
    """Usable rows by split."""
    bad: Mapping[str, int]
    """Unusable rows by reason."""
    named: tuple[str, ...]
    """The first unusable rows, each as `file:line: reason`."""


class ValidatedConfig(SourceConfig, Protocol):
    """The fields of the dataset section that decide whether its data is acceptable."""

    template: str | None
    train_on_prompt: bool
    max_bad_fraction: float


def validate_sources(config: ValidatedConfig, objective: str) -> Summary:
    """Check everything about the data that needs no tokenizer: fields, files, template name, every row.

    Args:
        config: The dataset section of a recipe, or anything with its fields.
        objective: `sft`, `pt` or `dpo`, as `training.stage`.

    Raises:
        ConfigError: a field, or a key of dataset_info.json.
        DataError: a file that is missing, empty or unreadable, or more bad rows than `max_bad_fraction` allows.
    """
    sources = resolve_sources(config, objective)
    if objective in ("sft", "dpo"):
        if config.template is None:
            raise ConfigError(
                f"dataset.template: required for training.stage {objective}; the chat template's name, e.g. qwen"
            )
        check_template(config.template)
    if sources[0].format.layout == "indexed":
        # Here, because it imports numpy.
        from mca_lib.data.indexed_format import open_indexed

        documents = sum(len(open_indexed(source.path.with_suffix("")).lengths_D) for source in sources)
        return Summary(documents, {"train": documents}, {}, ())
    if objective == "dpo" and config.train_on_prompt:
        raise ConfigError("dataset.train_on_prompt: pairs are compared by their answers alone; use false")
    kept: Counter[str] = Counter(train=0, eval=0)
    bad: Counter[str] = Counter()
    named: list[str] = []
    for sample in read_samples(sources):
        if isinstance(sample, Sample):
            kept[sample.split] += 1
            continue
        bad[sample.reason] += 1
        if len(named) < MAX_NAMED_ROWS:
            named.append(f"{sample.where}: {sample.reason}{sample.detail}")
    summary = Summary(kept.total() + bad.total(), dict(kept), dict(bad), tuple(named))
    if not kept["train"] or bad.total() > config.max_bad_fraction * summary.rows:
        raise too_many_bad_rows(bad, summary.rows, config.max_bad_fraction, named)
    return summary


def too_many_bad_rows(bad: Counter[str], rows: int, allowed: float, named: Sequence[str]) -> DataError:
    """The error for `bad` (rows by reason) of `rows`."""
    reasons = ", ".join(f"{n} × {reason}" for reason, n in bad.most_common(5))
    return DataError(
        f"{bad.total()} of {rows} rows are unusable ({reasons}), dataset.max_bad_fraction allows {allowed:g}; "
        f"first: {named[0]}"
    )


def read_samples(sources: Iterable[Source]) -> Iterator[Sample | BadRow]:
    """Every row of the sources in order, aligned, or why it cannot be.

    Raises:
        DataError: a file cannot be read, or a column that the user named occurs in none of its rows.
    """
    for source in sources:
        missing = set(source.format.named)
        first_keys: Sequence[str] = ()
        for row in read_rows(source.path, source.span):
            if isinstance(row.value, dict):
                if missing:
                    missing = {c for c in missing if source.format.columns[c] not in row.value}
                first_keys = first_keys or list(row.value)
            where = describe_place(source.path, row.place)
            if row.problem is not None:
                yield BadRow(row.problem, row.detail, where)
                continue
            try:
                sample = parse_row(row.value, source.format)._replace(split=source.split, where=where)
                yield _with_paths(sample, source) if sample.images else sample
            except UnusableRow as problem:
                yield BadRow(problem.reason, problem.detail, where)
        if first_keys:
            _refuse_missing(source, missing, first_keys)


def _with_paths(sample: Sample, source: Source) -> Sample:
    """The sample with its images where they are. Raises UnusableRow for one that is not there."""
    paths = tuple(str((source.media_dir or source.path.parent) / path) for path in sample.images)
    for name, path in zip(sample.images, paths, strict=True):
        try:
            there = Path(path).is_file()
        except OSError:  # a name that is too long
            there = False
        if not there:
            raise UnusableRow("image is not there", f": {name!r:.200}")
    return sample._replace(images=paths)


def _refuse_missing(source: Source, columns: Iterable[str], keys: Sequence[str]) -> None:
    for column in sorted(columns):
        name = str(source.format.columns[column])
        raise DataError(f"{source.path}: no row has the column {name!r} (columns.{column}){suggestion(name, keys)}")
