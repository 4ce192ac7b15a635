"""A row that cannot be used is counted by reason and named by file and line; too many of them fail."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet
import pytest

from mca_lib.data.rows import MAX_NAMED_ROWS, validate_sources
from mca_lib.errors import ConfigError, DataError
from tests.mca_lib.data.conftest import alpaca_rows, section, write_json, write_jsonl

GOOD = {"instruction": "a", "output": "b"}
GOOD_TALK = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}


def talk(*turns):
    return {"conversations": [{"from": role, "value": value} for role, value in turns]}


BAD_ALPACA = [
    ({"instruction": "a", "ouput": "b"}, "missing column 'output'", "did you mean 'ouput'"),
    ({"output": "b"}, "missing column 'instruction'", ""),
    ({"instruction": "a", "output": None}, "column 'output' is null", ""),
    ({"instruction": None, "output": "b"}, "column 'instruction' is null", ""),
    ({"instruction": "a", "output": 3}, "column 'output' is not a string", "a JSON number"),
    ({"instruction": "a", "input": ["x"], "output": "b"}, "column 'input' is not a string", "a JSON array"),
    ({"instruction": "", "input": "", "output": "b"}, "empty prompt", ""),
    ({"instruction": "a", "output": ""}, "empty output", ""),
    ({"instruction": "a", "output": "\ud800"}, "not encodable as UTF-8", ""),
    (["a", "b"], "not an object", "a JSON array"),
]

BAD_TALKS = [
    (talk(), "empty conversation", ""),
    (talk(("system", "s")), "empty conversation", ""),
    (talk(("human", "a")), "odd number of turns", ""),
    (talk(("human", "a"), ("gpt", "b"), ("human", "c")), "odd number of turns", ""),
    (talk(("human", "a"), ("humna", "b")), "bad role", "did you mean 'human'"),
    (talk(("gpt", "a"), ("human", "b")), "bad role order", "assistant as turn 1"),
    (talk(("human", "a"), ("human", "b")), "bad role order", "user as turn 2"),
    (talk(("human", "a"), ("gpt", "")), "empty output", ""),
    (talk(("human", "a"), ("gpt", None)), "column 'value' is null", "turn 2"),
    (talk(("human", 7), ("gpt", "b")), "column 'value' is not a string", "turn 1"),
    ({"conversations": "hi"}, "column 'conversations' is not a list of turns", ""),
    ({"conversations": ["hi"]}, "turn is not an object", "turn 1"),
    ({"conversations": None}, "column 'conversations' is not a list of turns", "a JSON null"),
    ({"conversation": []}, "missing column 'conversations'", "did you mean 'conversation'"),
]


@pytest.mark.parametrize(
    ("layout", "good", "bad", "reason", "detail"),
    [("alpaca", GOOD, *case) for case in BAD_ALPACA] + [("sharegpt", GOOD_TALK, *case) for case in BAD_TALKS],
)
def test_a_bad_row_is_counted_by_reason_and_named_by_line(tmp_path, layout, good, bad, reason, detail):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (good, bad, good)))
    summary = validate_sources(section(path, formatting=layout, max_bad_fraction=0.5), "sft")
    assert summary.bad == {reason: 1}
    assert summary.kept == {"train": 2, "eval": 0}
    (named,) = summary.named
    assert named.startswith(f"{path}:2: {reason}")
    assert detail in named


def test_bytes_of_a_parquet_file_are_called_bytes(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist([{"instruction": "a", "output": b"b"}]), path)
    with pytest.raises(DataError, match=r"rows\.parquet row 1: column 'output' is not a string: bytes$"):
        validate_sources(section(path), "sft")


@pytest.mark.parametrize(
    ("row", "reason"), [({"text": " \n"}, "empty text"), ({"text": None}, "column 'text' is null")]
)
def test_bad_plain_text_is_named(tmp_path, row, reason):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a"}, row])
    summary = validate_sources(section(path, formatting="text", template=None, max_bad_fraction=0.5), "pt")
    assert summary.bad == {reason: 1}


def test_history_must_be_pairs(tmp_path):
    rows = [{**GOOD, "history": history} for history in ([["q", "a"]], None, [], "q", [["q"]], [["q", 1]])]
    path = write_json(tmp_path / "rows.json", rows)
    columns = {"prompt": "instruction", "response": "output", "history": "history"}
    summary = validate_sources(section(path, columns=columns, max_bad_fraction=1.0), "sft")
    assert summary.bad == {"history is not a list of pairs": 3}


def test_one_malformed_line_of_many_is_tolerated_and_named(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", alpaca_rows(199))
    path.write_text(path.read_text() + '{"instruction": "a", "outp\n')
    summary = validate_sources(section(path), "sft")
    assert (summary.rows, summary.kept["train"], summary.bad) == (200, 199, {"malformed JSON": 1})
    assert summary.named[0].startswith(f"{path}:200: malformed JSON at column")


def test_too_many_bad_rows_fail_with_the_first_one_named(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [*alpaca_rows(10), {"instruction": "a", "output": None}])
    with pytest.raises(DataError) as caught:
        validate_sources(section(path), "sft")
    message = str(caught.value)
    assert "1 of 11 rows are unusable (1 × column 'output' is null)" in message
    assert f"first: {path}:11: column 'output' is null" in message
    assert "dataset.max_bad_fraction allows 0.01" in message
    assert "\n" not in message


def test_no_usable_row_fails_whatever_is_allowed(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"instruction": "a", "output": ""}])
    with pytest.raises(DataError, match="1 of 1 rows are unusable"):
        validate_sources(section(path, max_bad_fraction=1.0), "sft")


def test_a_named_column_that_no_row_has_is_refused(tmp_path):
    path = write_json(tmp_path / "rows.json", [{**GOOD, "system_prompt": "s"}] * 3)
    columns = {"prompt": "instruction", "response": "output", "system": "systemprompt"}
    with pytest.raises(DataError, match=r"no row has the column 'systemprompt' \(columns\.system\).*'system_prompt'"):
        validate_sources(section(path, columns=columns), "sft")


def test_all_bad_rows_are_counted_and_the_first_are_named(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [GOOD] + [{}] * 50)
    summary = validate_sources(section(path, max_bad_fraction=1.0), "sft")
    assert summary.bad == {"missing column 'instruction'": 50}
    assert len(summary.named) == MAX_NAMED_ROWS


def test_rows_of_eval_files_are_counted_apart(tmp_path):
    train = write_json(tmp_path / "train.json", alpaca_rows(5))
    held_out = write_json(tmp_path / "eval.json", alpaca_rows(2))
    assert validate_sources(section(train, eval_files=[str(held_out)]), "sft").kept == {"train": 5, "eval": 2}


@pytest.mark.parametrize(
    ("template", "message"),
    [("qwen_3", r"dataset\.template: unknown template 'qwen_3'; did you mean 'qwen3'"), (None, "template: required")],
)
def test_an_unknown_template_is_refused_before_any_row_is_read(tmp_path, template, message):
    path = tmp_path / "rows.json"
    path.write_text("not even JSON")
    with pytest.raises(ConfigError, match=message):
        validate_sources(section(path, template=template), "sft")


def test_validation_imports_nothing_heavy(tmp_path):
    path = write_json(tmp_path / "rows.json", alpaca_rows(3))
    program = (
        "import sys\n"
        "from mca_lib.data.rows import validate_sources\n"
        "from mca_lib.data.spec import DatasetSpec\n"
        f"validate_sources(DatasetSpec(files=[{str(path)!r}], template='chatml'), 'sft')\n"
        "print(sorted({'torch', 'transformers', 'llamafactory', 'datasets', 'numpy'} & set(sys.modules)))\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
