"""The GPUs of a machine, shared by the runs of one Prefect server: a global concurrency limit of that server.

Only the computing of the stage *train* holds it: what the store has, or another run computes, needs no GPU.
The limit is the server's (`mcaflow server up` makes it); where there is none, nobody waits. A lease that the server
forgets, say because it was restarted with leases in memory, costs a warning, not the training.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.client.schemas.responses import GlobalConcurrencyLimitResponse
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound

from mca_lib.errors import ConfigError
from tasks.report import Reporter
from tasks.stage import Occupy
from tasks.training_config import LauncherConfig

LIMIT = "mcaflow-gpu"
_LOOK_SECONDS = 2.0
_TRY_SECONDS = 10.0


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
        with ExitStack() as held:
            _wait(held, slots, check, report)
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


def _wait(held: ExitStack, slots: int, check: Callable[[], None], report: Reporter) -> None:
    """Enter the limit once it has room; the run can be cancelled while it waits."""
    told = False
    while True:
        check()
        limit = _limit()
        if limit is None or limit.active_slots + slots <= limit.limit:
            try:
                held.enter_context(concurrency(LIMIT, slots, timeout_seconds=_TRY_SECONDS))
                return
            except TimeoutError:
                continue  # somebody was faster
        if not told:
            report.info(f"waits for {slots} slots of {LIMIT}, where {limit.active_slots} of {limit.limit} are taken")
            told = True
        time.sleep(_LOOK_SECONDS)
