"""The GPUs of a machine, shared by the runs of one Prefect server: a global concurrency limit of that server.

Only the computing of the stage *train* holds it: what the store has, or another run computes, needs no GPU.
The limit is the server's (`mcaflow server up` makes it); where there is none, nobody waits. A lease that the server
forgets, say because it was restarted with leases in memory, costs a warning, not the training.

The lease stands among the labels of the run. So whoever finds the run dead can give its slots back at once: the hook
that the worker calls, and the next attempt at the run. Else they are free again when the lease ends. That is why this
does not use Prefect's `concurrency` (3.9), which keeps its lease to itself.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.responses import GlobalConcurrencyLimitResponse
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.runtime import flow_run

from mca_lib.errors import ConfigError
from tasks.report import Reporter
from tasks.stage import Occupy
from tasks.training_config import LauncherConfig

LIMIT = "mcaflow-gpu"
LABEL = "mcaflow.gpu-lease"
LEASE_SECONDS = 300.0
_RENEW_SECONDS = LEASE_SECONDS / 2
_LOOK_SECONDS = 2.0
_FULL = 423


def count() -> int:
    """GPUs of this machine, by their device files."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def slots_of(launcher: LauncherConfig) -> int:
    """Ranks on this machine, each with a GPU of its own; a Slurm job has GPUs elsewhere, which Slurm shares out."""
    return 0 if launcher.kind == "slurm" else launcher.nproc_per_node


def occupying(launcher: LauncherConfig, report: Reporter) -> Occupy:
    """For `tasks.stage.ensure`: holds a slot of the limit for each rank on this machine."""

    @contextmanager
    def occupy(check: Callable[[], None]) -> Iterator[None]:
        slots, limit = slots_of(launcher), _limit()
        if slots == 0 or limit is None:
            yield
            return
        if slots > limit.limit:
            raise ConfigError(
                f"launcher.nproc_per_node: {slots} ranks, but the server's limit {LIMIT} has {limit.limit} slots; use "
                f"fewer ranks, or raise it (prefect gcl update {LIMIT} --limit {slots})"
            )
        run_id = UUID(flow_run.id) if flow_run.id else None
        if run_id is not None:
            release_left(run_id)  # by an attempt that was killed
        with _held(_wait(slots, check, report), run_id, report):
            yield

    return occupy


def _limit() -> GlobalConcurrencyLimitResponse | None:
    """The limit; None where the server has none, or has it switched off."""
    with get_client(sync_client=True) as client:
        try:
            limit = client.read_global_concurrency_limit_by_name(LIMIT)
        except ObjectNotFound:
            return None
    return limit if limit.active else None


def release_left(run_id: UUID) -> None:
    """Give back the slots of a run of which no process is left; harmless where it has none."""
    with get_client(sync_client=True) as client:
        lease = client.read_flow_run(run_id).labels.get(LABEL)
    if lease:
        _give_back(UUID(str(lease)), run_id)


def _wait(slots: int, check: Callable[[], None], report: Reporter) -> UUID | None:
    """Take the slots once the limit has room; the run can be cancelled while it waits. Returns the lease; None
    where the limit is gone meanwhile.
    """
    told = False
    while True:
        check()
        limit = _limit()
        if limit is None:
            return None
        if limit.active_slots + slots <= limit.limit:
            with get_client(sync_client=True) as client:
                try:
                    taken = client.increment_concurrency_slots_with_lease([LIMIT], slots, "concurrency", LEASE_SECONDS)
                    return UUID(taken.json()["lease_id"])
                except PrefectHTTPStatusError as error:
                    if error.response.status_code != _FULL:
                        raise
            continue  # somebody was faster
        if not told:
            report.info(f"waits for {slots} slots of {LIMIT}, where {limit.active_slots} of {limit.limit} are taken")
            told = True
        time.sleep(_LOOK_SECONDS)


@contextmanager
def _held(lease: UUID | None, run_id: UUID | None, report: Reporter) -> Iterator[None]:
    """Renew the lease until the block ends, then give it back; a server that is away then costs a warning."""
    if lease is None:
        yield
        return
    with get_client(sync_client=True) as client:
        if run_id is not None:
            client.update_flow_run_labels(run_id, {LABEL: str(lease)})
    ended = threading.Event()
    renewing = threading.Thread(target=_renew, args=(lease, ended, report), daemon=True)
    renewing.start()
    try:
        yield
    finally:
        ended.set()
        renewing.join(2)
        try:
            _give_back(lease, run_id)
        except httpx.HTTPError as error:  # must not cost what was computed meanwhile
            report.warning(f"the slots of {LIMIT} are free when their lease ends, as the server is away: {error}")


def _give_back(lease: UUID, run_id: UUID | None) -> None:
    with get_client(sync_client=True) as client:
        client.release_concurrency_slots_with_lease(lease)
        if run_id is not None:
            client.update_flow_run_labels(run_id, {LABEL: ""})


def _renew(lease: UUID, ended: threading.Event, report: Reporter) -> None:
    while not ended.wait(_RENEW_SECONDS):
        try:
            with get_client(sync_client=True) as client:
                client.renew_concurrency_lease(lease, LEASE_SECONDS)
        except PrefectHTTPStatusError:  # it has forgotten the lease
            report.warning(f"the slots of {LIMIT} are no longer reserved; the training goes on")
            return
        except httpx.HTTPError:
            continue  # the server is away
