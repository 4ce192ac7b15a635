"""Every kind of file gives the same rows, and a file that cannot be read is named with the point where it breaks."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from mca_lib.data.files import describe_place, read_rows
from mca_lib.errors import DataError

ROWS = [
    {"instruction": 'Say "hi",\nplease', "output": "hi"},
    {"instruction": "東京 is?", "output": "a city 🏙"},
    {"instruction": "x", "output": ""},
]


def write_csv(path):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["instruction", "output"])
        writer.writeheader()
        writer.writerows(ROWS)


WRITERS = {
    "array.json": lambda path: path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8"),
    "lines.json": lambda path: path.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8"),
    "lines.jsonl": lambda path: path.write_text("\n\n".join(map(json.dumps, ROWS)) + "\n", encoding="utf-8"),
    "table.csv": write_csv,
    "table.parquet": lambda path: pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path)
    assert [row.value for row in read_rows(path)] == ROWS


@pytest.mark.parametrize("name", ["array.json", "lines.json", "lines.jsonl", "table.csv"])
def test_a_byte_order_mark_is_not_data(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [row.value for row in read_rows(path)] == ROWS


def test_each_line_of_a_text_file_is_a_row_and_empty_lines_are_not(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffone\r\n\n  \nzwölf\nlast".encode())
    assert [(row.value["text"], row.place) for row in read_rows(path)] == [
        ("one", (1, 0)),
        ("zwölf", (4, 0)),
        ("last", (5, 0)),
    ]


def places(path):
    return [describe_place(path, row.place).removeprefix(str(path)) for row in read_rows(path)]


def test_rows_are_named_by_line_where_the_file_has_lines(tmp_path):
    for name in WRITERS:
        WRITERS[name](tmp_path / name)
    assert places(tmp_path / "array.json") == [":2 (row 1)", ":6 (row 2)", ":10 (row 3)"]
    assert places(tmp_path / "lines.jsonl") == [":1", ":3", ":5"]
    assert places(tmp_path / "table.csv") == [":2", ":4", ":5"]
    assert places(tmp_path / "table.parquet") == [" row 1", " row 2", " row 3"]


def test_a_malformed_line_of_jsonl_is_a_bad_row_and_reading_goes_on(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"a": 1}\n{"a": 2,}\n"text"\n{"a": "\xff"}\n' + b"[" * 100_000 + b'\n{"a": ' + b"1" * 5000 + b'}\n{"a": 3}\n'
    )
    rows = list(read_rows(path))
    bad = "malformed JSON"
    assert [row.problem for row in rows] == [None, bad, None, "not UTF-8 text", bad, bad, None]
    assert rows[1].place == (2, 0)
    assert rows[1].detail.startswith(" at column ")
    assert rows[-1].value == {"a": 3}


BROKEN = {
    "comma.json": (b'[\n{"a": 1},\n{"a": 2} {"a": 3}\n]', r"comma\.json:3: malformed JSON in row 2 at column 10"),
    "cut.json": (b'[\n{"a": 1},\n{"a": "tex', r"cut\.json:3: malformed JSON in row 2"),
    "trailing.json": (b'[{"a": 1},\n]', r"trailing\.json:2: malformed JSON in row 2 at column 1"),
    "two.json": (b'[{"a": 1}]\n[]', r"two\.json:2: malformed JSON at column 1: text after the end"),
    "latin.json": (b'[\n{"a": "\xe4"}]', r"latin\.json:2: not UTF-8 text"),
    "deep.json": (b"[" + b"[" * 100_000, r"deep\.json:1: malformed JSON in row 1 .*nested too deeply"),
    "digits.json": (b'[\n{"a": ' + b"1" * 5000 + b"}]", r"digits\.json:2: malformed JSON in row 1 .*too many digits"),
    "twice.csv": (b"a,b,a\n1,2,3\n", r"twice\.csv:1: the header names a column twice"),
    "quote.csv": (b'a,b\n1,"2\n', r"quote\.csv:2: malformed CSV"),
    "latin.csv": (b"a,b\n1,\xe4\n", r"latin\.csv: not UTF-8"),
    "not.parquet": (b"PAR1 but not really PAR1", r"not\.parquet: damaged or not a parquet file"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_the_point_where_it_breaks(tmp_path, name):
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        list(read_rows(tmp_path / name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.json", b""), ("b.json", b"[]"), ("c.json", b" \n"), ("d.jsonl", b"\n\n"), ("e.csv", b"a,b\n"), ("f.txt", b"")],
)
def test_an_empty_file_is_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}: is empty"):
        list(read_rows(tmp_path / name))


def test_a_csv_line_with_the_wrong_number_of_fields_is_a_bad_row(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n3\n4,5,6\n7,8\n")
    assert [(row.value, row.problem) for row in read_rows(path)] == [
        ({"a": "1", "b": "2"}, None),
        (None, "malformed CSV"),
        (None, "malformed CSV"),
        ({"a": "7", "b": "8"}, None),
    ]
