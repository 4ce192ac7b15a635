"""A folder of tasks for lm-evaluation-harness, with their data."""

import json
from pathlib import Path
from typing import Any

ROWS = [
    {"question": "Two and two is", "choices": ["four", "five", "nine hundred"], "answer": 0},
    {"question": "After one comes", "choices": ["two", "three", "ten"], "answer": 0},
    {"question": "Before nine comes", "choices": ["eight", "four", "one hundred"], "answer": 0},
    {"question": "Half of eight is", "choices": ["six", "four", "ten"], "answer": 1},
]
COMMON = """\
dataset_path: json
dataset_kwargs: {data_files: {test: data/rows.jsonl}}
test_split: test
doc_to_text: "{{question}}"
"""
FILES = {
    "common": COMMON,
    "choices.yaml": """\
include: common
task: choices
tag: tiny
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: answer
""",
    "answers.yaml": """\
include: common
task: answers
tag: [tiny]
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 6}
filter_list:
  - name: strict-match
    filter: [{function: take_first}]
""",
    "likely.yaml": """\
include: common
task: likely
output_type: loglikelihood
doc_to_target: " {{choices[answer]}}"
""",
    "all.yaml": """\
group: all
task: [choices, likely]
aggregate_metric_list: [{metric: acc}]
""",
}


def write_tasks(folder: Path, rows: list[dict[str, Any]] = ROWS, **files: str) -> Path:
    """The folder; `files` are more YAML files by name."""
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in {**FILES, **{f"{name}.yaml": text for name, text in files.items()}}.items():
        (folder / name).write_text(text)
    return folder
