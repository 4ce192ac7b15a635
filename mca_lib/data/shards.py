"""Data files in parts that can be read side by side: whole lines of text files, row groups of parquet.

A JSON array and a CSV file (whose fields may span lines) are one part each. All parts in order are all rows in order,
with their line numbers, however many there are.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mca_lib.data.files import Span
from mca_lib.data.formats import RowFormat, Source

SHARD_BYTES = 16 << 20
MAX_SHARDS = 4096
_BLOCK = 1 << 22


def cut_sources(sources: Sequence[Source]) -> list[Source]:
    """The sources in parts of about `SHARD_BYTES`, larger where there would be more than `MAX_SHARDS`."""
    size = max(SHARD_BYTES, sum(source.path.stat().st_size for source in sources) // MAX_SHARDS)
    return [replace(source, span=span) for source in sources for span in _spans(source.path, size)]


def write_shards(path: Path, shards: Sequence[Source]) -> bool:
    """Leave word of the parts for `read_shard`, which another machine may call. True when it was there already."""
    lines = [
        {
            "path": str(shard.path.resolve()),
            "layout": shard.format.layout,
            "columns": dict(shard.format.columns),
            "split": shard.split,
            "span": shard.span,
        }
        for shard in shards
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    if path.exists() and path.read_text(encoding="utf-8") == content:
        return True
    path.write_text(content, encoding="utf-8")
    return False


def read_shard(path: Path, number: int) -> Source:
    """Part `number` of what `write_shards` wrote. Its rows are not checked for columns that all of them lack."""
    with path.open(encoding="utf-8") as file:
        line: dict[str, Any] = json.loads(next(text for index, text in enumerate(file) if index == number))
    row_format = RowFormat(line["layout"], line["columns"], named=frozenset(), tags={})
    span = Span(*line["span"]) if line["span"] else None
    return Source(Path(line["path"]), row_format, line["split"], span=span)


def _spans(path: Path, size: int) -> Iterator[Span | None]:
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".txt"):
        yield from _line_spans(path, size)
    elif suffix == ".parquet":
        yield from _row_group_spans(path, size)
    else:
        yield None


def _line_spans(path: Path, size: int) -> Iterator[Span]:
    length, start, before = path.stat().st_size, 0, 0
    with path.open("rb") as file:
        while start < length:
            lines = 0
            while file.tell() < min(start + size, length):
                lines += file.read(min(_BLOCK, start + size - file.tell())).count(b"\n")
            # The rest of the line in which the part would end.
            lines += file.readline().endswith(b"\n")
            yield Span(start, file.tell(), before)
            start, before = file.tell(), before + lines


def _row_group_spans(path: Path, size: int) -> Iterator[Span]:
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(path)
    start = before = rows = weight = 0
    for group in range(metadata.num_row_groups):
        rows += metadata.row_group(group).num_rows
        weight += metadata.row_group(group).total_byte_size
        if weight >= size or group == metadata.num_row_groups - 1:
            yield Span(start, group + 1, before)
            start, before, rows, weight = group + 1, before + rows, 0, 0
