"""`kill -9` of `mcaflow run`: nothing outlives it, nothing half is left, and the next run goes on.

`tests/acceptance/kill_stages.py` does the same in every stage, at random moments.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from flows.graph import NODES
from flows.recipe import PipelineConfig
from tests.acceptance.harness import artifacts, launch
from tests.flows.finished import Run


def test_killed_while_training_it_leaves_no_process_and_the_next_run_resumes_to_the_same_bits(
    run: Run, write_recipe: Callable[[PipelineConfig], Path], tmp_path: Path
):
    config = run.with_fields(training={"save_steps": 1})
    store = Path(config.store.path)
    shutil.rmtree(store / "train")
    recipe = write_recipe(config)
    # Without a server: the temporary one is a process of the run too.
    env = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    env |= {"PREFECT_HOME": str(tmp_path / "prefect"), "COLUMNS": "200"}

    killed = launch(recipe, store, tmp_path / "killed.log", env)
    while not list(store.glob(".work/train-*/checkpoint-*/.record.json")):
        with suppress(subprocess.TimeoutExpired):
            raise AssertionError(f"ended with {killed.wait(0.02)} before it was killed:\n{killed.output()}")
    assert len(killed.family()) >= 5, "the flow, its server, torchrun and two ranks"
    killed.signal(signal.SIGKILL)
    killed.seconds_until_gone(limit=10)
    assert not (store / "train").exists()

    resumed = launch(recipe, store, tmp_path / "resumed.log", env)
    assert resumed.wait() == 0, resumed.output()
    assert "resuming from" in resumed.output()
    assert resumed.printed() == dict.fromkeys(NODES, "cached") | {"train": "computed"}
    assert artifacts(store)["train"].digest == run.result.outcomes["train"].artifact.digest
