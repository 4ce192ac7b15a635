"""The documents' Python examples, run as they stand."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

from mca_lib.converter.mappings import padded_vocab_size
from mca_lib.tiny_models import make_tiny_model
from tests.mca_lib.trainers.training import make_store

ROOT = Path(__file__).parents[1]

# In one process per rank, which has torch and Megatron to import once.
BOTH = """
import sys
from runpy import run_path

from megatron.core import parallel_state

from mca_lib.errors import UserError

for script, *arguments in (
    ("load.py", "model", "loaded"), ("train.py", "model", "data", "trained"), ("load.py", "model", "loaded")
):
    sys.argv = [script, *arguments]
    try:
        run_path(script)
    except UserError as error:
        print("refused:", error)
    parallel_state.destroy_model_parallel()  # the process group stays
"""


def test_the_examples_load_a_model_and_train_it_on_two_ranks(tmp_path: Path) -> None:
    load, train = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    for name, script in {"load": load, "train": train, "both": BOTH}.items():
        (tmp_path / f"{name}.py").write_text(script)
    make_tiny_model(tmp_path / "model", num_hidden_layers=2, dtype="bfloat16")
    for split, rows in {"train": 16, "eval": 4}.items():
        make_store(tmp_path / "data", rows, split=split)

    launch = [sys.executable, "-m", "mca_lib.launch", "--nproc_per_node", "2", "both.py"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(launch, cwd=tmp_path, env=env, capture_output=True, text=True)

    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"]
    # Two ranks share the pipe, so only what is written at once is whole: not a line.
    assert run.stdout.count(f"(1, 4, {padded_vocab_size(rows, 2) // 2})") == run.stdout.count("torch.float32") == 4
    assert run.stdout.count("loaded: exists and is not empty") == 2
    names = ("model", "loaded", "trained/hf")
    before, after, trained = (load_file(tmp_path / name / "model.safetensors") for name in names)
    assert before.keys() == after.keys() == trained.keys()
    assert all(before[name].equal(after[name]) and before[name].dtype == after[name].dtype for name in before)
    assert not all(before[name].equal(trained[name]) for name in before)
    result = json.loads((tmp_path / "trained" / "train_result.json").read_text())
    assert result["steps"] < 100, "the callback stops the training"
    assert result["eval_loss"] < 0.5
    assert run.stdout.count(str(result["eval_loss"])) == 2
