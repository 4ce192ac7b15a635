"""The demonstration's assets: the same on every run, and a task that can be learned rather than looked up."""

import json
import subprocess
import sys
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest

from mca_lib.demo_assets import make_demo_assets
from mca_lib.demo_rows import make_rows


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Two folders, filled by this process and by another one."""
    parent = tmp_path_factory.mktemp("demo")
    make_demo_assets(parent / "one")
    subprocess.run([sys.executable, "-m", "mca_lib.demo_assets", str(parent / "two")], check=True)
    return [parent / "one", parent / "two"]


def test_two_processes_write_the_same_bytes(folders):
    one, two = (
        {
            file.relative_to(folder): sha256(file.read_bytes()).hexdigest()
            for file in folder.rglob("*")
            if file.is_file()
        }
        for folder in folders
    )
    assert {"data.json", "pairs.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in one
    }
    assert one == two


def test_data_file_is_alpaca_json(folders):
    rows = json.loads((folders[0] / "data.json").read_text(encoding="utf-8"))
    assert rows == make_rows()
    assert {frozenset(row) for row in rows} == {frozenset({"instruction", "input", "output"})}


def test_pairs_file_holds_a_right_and_a_wrong_answer(folders):
    rows = json.loads((folders[0] / "pairs.json").read_text(encoding="utf-8"))
    right = {row["instruction"]: row["output"] for row in make_rows()}
    assert len({row["instruction"] for row in rows}) == len(rows) > 200
    for row in rows:
        assert row["chosen"] == right[row["instruction"]] != row["rejected"]


def test_no_row_is_given_twice():
    questions = Counter((row["instruction"], row["input"]) for row in make_rows())
    assert max(questions.values()) == 1


def test_every_answer_is_asked_for_in_several_ways():
    """Otherwise a held-out row would ask for something that was never shown."""
    answers = Counter(row["output"] for row in make_rows())
    assert min(answers.values()) >= 3


def test_model_fits_two_tensor_parallel_or_pipeline_ranks(folders):
    config = json.loads((folders[0] / "model" / "config.json").read_text())
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "num_hidden_layers"):
        assert config[field] % 2 == 0, field
