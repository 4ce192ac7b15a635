"""Stopping workers in good order: no new runs, those that run come to their end, or are cancelled after a while.

A worker that is simply stopped kills its runs, and they stay Running until their signs of life are missed (Prefect
3.9). A cancelled training writes a checkpoint first; a retry of its run goes on from there.
"""

import time
from collections.abc import Callable

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling

from flows.server import require_server
from mca_lib.errors import ConfigError

_LOOK_SECONDS = 1.0
CANCEL_SECONDS = 60.0
"""For which a cancelled run is waited; a worker kills it after 30."""
_UNDER_WAY = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]


def drain_pool(pool: str, patience: float | None) -> None:
    """``mcaflow server drain``: pause the pool and wait; after `patience` seconds cancel what still runs."""
    require_server()
    with get_client(sync_client=True) as client:
        try:
            pause(client, pool, paused=True)
        except ObjectNotFound:
            raise ConfigError(f"--pool {pool}: the server has no such work pool") from None
        deadline = None if patience is None else time.monotonic() + patience
        wait(client, pool, lambda: deadline is not None and time.monotonic() >= deadline)
    print(f"nothing runs in {pool}, which is paused; prefect work-pool resume {pool} lets it go on")


def pause(client: SyncPrefectClient, pool: str, *, paused: bool) -> None:
    """Workers take no new runs from a paused pool."""
    client.read_work_pool(pool)
    client.update_work_pool(pool, WorkPoolUpdate(is_paused=paused))


def wait(client: SyncPrefectClient, pool: str, impatient: Callable[[], bool]) -> None:
    """Until nothing of the pool runs; once `impatient` says so, what runs is cancelled.

    A run that does not even end after that, because its worker is gone, is left to the automation for such runs.
    """
    told: set[str] = set()
    give_up = None
    while runs := under_way(client, pool):
        for run in runs:
            if run.name not in told:
                print(f"waits for {run.name} ({run.state_name})", flush=True)
                told.add(run.name)
        if give_up is None and impatient():
            cancel(client, runs)
            give_up = time.monotonic() + CANCEL_SECONDS
        if give_up is not None and time.monotonic() >= give_up:
            print(f"{len(runs)} cancelled runs have not ended; their worker seems to be gone", flush=True)
            return
        time.sleep(_LOOK_SECONDS)


def under_way(client: SyncPrefectClient, pool: str) -> list[FlowRun]:
    """Runs of the pool that have a process, or are about to get one."""
    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_UNDER_WAY))),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
    )


def cancel(client: SyncPrefectClient, runs: list[FlowRun]) -> None:
    """Their worker ends them with SIGTERM; a training writes a checkpoint."""
    for run in runs:
        print(f"cancels {run.name}", flush=True)
        client.set_flow_run_state(run.id, Cancelling(message="The worker is being stopped."))
