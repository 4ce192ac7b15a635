"""Reading data files row by row, each row with its place in the file.

A row that cannot be parsed on its own (a line of jsonl) is reported as a problem of that row and reading goes on; a
file that cannot be read past a point (a JSON array, a damaged parquet file) raises a DataError that names the point.
Every kind of file is UTF-8, with or without a byte order mark.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mca_lib.errors import DataError

_SPACE = re.compile(r"[ \t\r\n]*")
_BOM = b"\xef\xbb\xbf"
_PARQUET_BATCH = 1024
LONG_NUMBER = "a number with too many digits"


class RawRow(NamedTuple):
    """A row as the file has it."""

    place: tuple[int, int]
    """(line, row), counted from 1; 0 where the file has no such notion."""
    value: Any
    problem: str | None = None
    """Kind of problem, when the row could not be parsed; `value` is then None."""
    detail: str = ""


class Span(NamedTuple):
    """A part of a file: bytes of whole lines, or row groups of parquet."""

    start: int
    stop: int
    before: int
    """Lines, or rows of parquet, before it."""


def read_rows(path: Path, span: Span | None = None) -> Iterator[RawRow]:
    """The rows of a data file, or of a part of it (`mca_lib/data/shards.py`), in order.

    Raises:
        DataError: the file cannot be read (further), or the whole of it has no row.
    """
    rows = 0
    read = _READERS[path.suffix.lower()]
    try:
        for row in read(path) if span is None else read(path, span):
            rows += 1
            yield row
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    if rows == 0 and span is None:
        raise DataError(f"{path}: is empty; it must hold at least one row")


def describe_place(path: Path, place: tuple[int, int]) -> str:
    """`file:line`, with the row where it differs from the line."""
    line, row = place
    if not line:
        return f"{path} row {row}"
    return f"{path}:{line}" + (f" (row {row})" if row else "")


def _read_json(path: Path) -> Iterator[RawRow]:
    """A JSON array of rows, or, when the text does not start with `[`, one JSON object per line."""
    try:
        text = path.read_bytes().removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8 text (byte {error.object[error.start]:#04x})") from None
    start = _skip_space(text, 0)
    if start == len(text):
        return
    if text[start] == "[":
        yield from _read_array(path, text, start + 1)
    else:
        yield from _read_jsonl(path)


def _read_array(path: Path, text: str, position: int) -> Iterator[RawRow]:
    decode = json.JSONDecoder().raw_decode
    line, counted, row = 1, 0, 0
    position = _skip_space(text, position)
    if text.startswith("]", position):
        _expect_end(path, text, position + 1)
        return
    while True:
        row += 1
        line += text.count("\n", counted, position)
        counted = position
        try:
            value, position = decode(text, position)
        except json.JSONDecodeError as error:
            raise _array_error(path, text, error.pos, error.msg, row) from None
        except RecursionError:
            raise _array_error(path, text, position, "nested too deeply", row) from None
        except ValueError:  # Python's limit on the digits of an integer
            raise _array_error(path, text, position, LONG_NUMBER, row) from None
        yield RawRow((line, row), value)
        position = _skip_space(text, position)
        if text.startswith("]", position):
            _expect_end(path, text, position + 1)
            return
        if not text.startswith(",", position):
            raise _array_error(path, text, position, "expecting ',' or ']' after a row", row)
        position = _skip_space(text, position + 1)


def _skip_space(text: str, position: int) -> int:
    return _SPACE.match(text, position).end()  # type: ignore[union-attr]  # matches the empty string too


def _expect_end(path: Path, text: str, position: int) -> None:
    position = _skip_space(text, position)
    if position != len(text):
        raise _array_error(path, text, position, "text after the end of the array", 0)


def _array_error(path: Path, text: str, position: int, what: str, row: int) -> DataError:
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    in_row = f" in row {row}" if row else ""
    return DataError(f"{path}:{line}: malformed JSON{in_row} at column {column}: {what}")


def _lines(path: Path, span: Span | None) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers."""
    with path.open("rb") as file:
        if span is None:
            yield from enumerate(file, start=1)
            return
        file.seek(span.start)
        left = span.stop - span.start
        for line, raw in enumerate(file, start=span.before + 1):
            if left <= 0:
                return
            left -= len(raw)
            yield line, raw


def _read_jsonl(path: Path, span: Span | None = None) -> Iterator[RawRow]:
    for line, raw in _lines(path, span):
        text = raw.removeprefix(_BOM) if line == 1 else raw
        if not text.strip():
            continue
        place = (line, 0)
        try:
            yield RawRow(place, json.loads(text.decode("utf-8")))
        except json.JSONDecodeError as error:
            yield RawRow(place, None, "malformed JSON", f" at column {error.colno}: {error.msg}")
        except UnicodeDecodeError:
            yield RawRow(place, None, "not UTF-8 text")
        except RecursionError:
            yield RawRow(place, None, "malformed JSON", ": nested too deeply")
        except ValueError:  # Python's limit on the digits of an integer
            yield RawRow(place, None, "malformed JSON", f": {LONG_NUMBER}")


def _read_csv(path: Path) -> Iterator[RawRow]:
    """Rows by the names of the header line; a text field may span lines."""
    csv.field_size_limit(2**31 - 1)  # the default refuses texts over 128 KiB
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, None)
            if header is None:
                return
            if len(set(header)) != len(header):
                raise DataError(f"{path}:1: the header names a column twice: {', '.join(header)}")
            line = reader.line_num + 1
            for fields in reader:
                place, line = (line, 0), reader.line_num + 1
                if not fields:
                    continue
                if len(fields) != len(header):
                    yield RawRow(place, None, "malformed CSV", f": {len(fields)} fields, the header has {len(header)}")
                else:
                    yield RawRow(place, dict(zip(header, fields, strict=True)))
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: malformed CSV: {error}") from None
        except UnicodeDecodeError:
            raise DataError(f"{path}: not UTF-8 text, after line {reader.line_num}") from None


def _read_parquet(path: Path, span: Span | None = None) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            row = span.before if span else 0
            groups = range(span.start, span.stop) if span else range(file.num_row_groups)
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH, row_groups=list(groups)):
                for value in batch.to_pylist():
                    row += 1
                    yield RawRow((0, row), value)
    except (pyarrow.ArrowException, OSError) as error:
        detail = " ".join(str(error).split())
        raise DataError(f"{path}: damaged or not a parquet file: {detail}") from None


def _read_text(path: Path, span: Span | None = None) -> Iterator[RawRow]:
    """One document per line; empty lines are skipped."""
    for line, raw in _lines(path, span):
        data = raw.removeprefix(_BOM) if line == 1 else raw
        if not data.strip():
            continue
        try:
            yield RawRow((line, 0), {"text": data.decode("utf-8").rstrip("\r\n")})
        except UnicodeDecodeError:
            yield RawRow((line, 0), None, "not UTF-8 text")


_READERS: dict[str, Callable[..., Iterator[RawRow]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
