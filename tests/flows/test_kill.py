"""`mcaflow run`, killed or terminated while it trains: nothing outlives it, nothing half is left, the next run goes on.

`tests/acceptance/kill_stages.py` and `interrupts.py` do the same in every stage, at random moments.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.sorting import FlowRunSort
from prefect.settings import PREFECT_API_URL

from flows.graph import nodes_of
from flows.recipe import PipelineConfig
from tasks.ledger import entries
from tasks.store import ArtifactStore
from tests.acceptance.harness import Running, artifacts, launch, newest_checkpoint
from tests.flows.finished import Run


@pytest.fixture
def start(run: Run, write_recipe: Callable[[PipelineConfig], Path], tmp_path: Path) -> Callable[..., Running]:
    """Start the command line on a store in which all is there but the training; a checkpoint after every step."""
    config = run.with_fields(training={"save_steps": 1, "save_total_limit": 9})
    store = Path(config.store.path)
    shutil.rmtree(store / "train")
    recipe = write_recipe(config)
    # Without a server: the temporary one is a process of the run too. Else the tests' own, to be asked afterwards.
    env = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    env |= {"PREFECT_HOME": str(tmp_path / "prefect"), "COLUMNS": "200"}
    logs = iter(tmp_path / f"{number}.log" for number in range(9))
    return lambda **more: launch(recipe, store, next(logs), env | more)


def await_checkpoint(running: Running) -> None:
    while not newest_checkpoint(running.store):
        with suppress(subprocess.TimeoutExpired):
            raise AssertionError(f"ended with {running.wait(0.02)} before there was one:\n{running.output()}")


def test_killed_it_leaves_no_process_and_the_next_run_resumes_to_the_same_bits(run: Run, start: Callable[..., Running]):
    killed = start()
    await_checkpoint(killed)
    assert len(killed.family()) >= 5, "the flow, its server, torchrun and two ranks"
    killed.signal(signal.SIGKILL)
    killed.seconds_until_gone()
    assert not (killed.store / "train").exists()
    ((entry, is_alive), *_) = entries(ArtifactStore(killed.store))
    assert (entry.state, is_alive) == ("running", False), "nothing is kept for a dead run"

    resumed = start()
    assert resumed.wait() == 0, resumed.output()
    assert "resuming from" in resumed.output()
    assert resumed.printed() == dict.fromkeys(nodes_of(run.config), "cached") | {"train": "computed"}
    assert artifacts(resumed.store)["train"].digest == run.result.outcomes["train"].artifact.digest


def test_terminated_it_saves_a_checkpoint_and_leaves_no_process_and_nothing_that_runs(start: Callable[..., Running]):
    terminated = start(PREFECT_API_URL=PREFECT_API_URL.value())
    await_checkpoint(terminated)
    terminated.signal(signal.SIGTERM)
    assert terminated.wait() == 128 + signal.SIGTERM
    terminated.seconds_until_gone()
    assert newest_checkpoint(terminated.store) >= terminated.trained_steps()[-1]
    assert f"it goes on from checkpoint-{newest_checkpoint(terminated.store)}" in terminated.output()
    assert "the same command goes on from what is finished" in terminated.output()
    with get_client(sync_client=True) as client:
        (flow_run,) = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)
        run_filter = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id]))
        states = {task.name.split()[0]: task.state.name for task in client.read_task_runs(flow_run_filter=run_filter)}
    assert flow_run.state.name == "Crashed"
    assert states == dict.fromkeys(("download", "dataset", "convert"), "Cached") | {"train": "Crashed"}
    assert entries(ArtifactStore(terminated.store))[0][0].state == "cancelled"
