"""The documents' Python example, run as it stands."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

from mca_lib.converter.mappings import padded_vocab_size
from mca_lib.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[1]


def test_the_example_loads_a_model_on_two_ranks_and_writes_it_back(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/models-without-a-recipe.md").read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    make_tiny_model(tmp_path / "model", num_hidden_layers=2, dtype="bfloat16")

    def run() -> subprocess.CompletedProcess[str]:
        launch = [sys.executable, "-m", "mca_lib.launch", "--nproc_per_node", "2", "example.py", "model", "output"]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.run(launch, cwd=tmp_path, env=env, capture_output=True, text=True)

    first = run()
    assert first.returncode == 0, first.stderr
    rows = json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"]
    assert first.stdout.splitlines() == [f"(1, 4, {padded_vocab_size(rows, 2) // 2}) torch.float32"] * 2
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "output"))
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) and before[name].dtype == after[name].dtype for name in before)
    again = run()
    assert again.returncode != 0
    assert "output: exists and is not empty" in again.stderr
