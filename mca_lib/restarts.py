"""Which failures of ranks torchrun answers with a restart of all of them (`--max-restarts`).

    a rank was killed, or failed by a defect      all ranks start again, from the newest whole checkpoint
    a mistake of the user, SIGTERM                no restart: it would end in the same way

A restart is told to the run with its cause. Of several failures that is the rank that a signal killed, before errors
of ranks that then lost their connection to it.

torchrun (2.15) restarts after any failure, and then hands the ranks the store of the attempt before, with addresses
where nobody listens any more: gloo cannot connect (pytorch/pytorch#167288). Its agent is subclassed here, in three
methods of its own protocol.
"""

import logging
import os
import signal
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from mca_lib.progress import tell
from mca_lib.rank_process import ERRORS_VARIABLE, first_failure, rank_failure, report_launcher_failure

FINAL_CODES = frozenset({2, 128 + signal.SIGTERM})
"""Exit codes by which a rank says that it is not to be started again: a mistake of the user, and stopped by SIGTERM."""
# Sent by torchrun to the ranks that are left, and by NCCL's watchdog to its own rank when another one is gone.
_CONSEQUENCES = (-signal.SIGTERM, -signal.SIGABRT)
_AT_ONCE_SECONDS = 10
"""torchrun kills ranks that do not heed its SIGTERM after 30 s; what was killed by then is the cause of nothing."""
log = logging.getLogger(__name__)


class RestartingAgent(LocalElasticAgent):
    """torchrun's agent on one machine, which tells failures that a restart may mend from others."""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """A store for each attempt: the handler keeps the first one for good."""
        handler = worker_group.spec.rdzv_handler
        handler._bootstrap_store_info = handler._shared_tcp_store_server = None
        super()._rendezvous(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            if _is_final(result):
                self._remaining_restarts = 0
            else:
                self._tell(result.failures, worker_group.spec.max_restarts)
        return result

    def _tell(self, failures: dict[int, ProcessFailure], max_restarts: int) -> None:
        """What comes of these failures: a restart, or the end."""
        killed = _killed(failures)
        if self._remaining_restarts:
            count = max_restarts - self._remaining_restarts + 1
            cause = killed or _reported(failures)
            tell("warning", f"{cause}; all ranks start again, restart {count} of {max_restarts}")
        elif killed and (directory := os.environ.get(ERRORS_VARIABLE)):
            report_launcher_failure(Path(directory), killed)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """A failure that this attempt may recover from goes to the log, and is no longer the cause of anything."""
        directory = os.environ.get(ERRORS_VARIABLE)
        for worker in worker_group.workers if directory else ():
            path = rank_failure(Path(directory), worker.global_rank)
            if path.exists():
                log.warning("all ranks are started again after: %s", path.read_text())
                path.unlink()
        return super()._start_workers(worker_group)


def _killed(failures: dict[int, ProcessFailure]) -> str | None:
    """The first rank that a signal killed from outside, in words."""
    first = min(failure.timestamp for failure in failures.values())
    for rank, failure in sorted(failures.items(), key=lambda item: item[1].timestamp):
        at_once = failure.timestamp - first < _AT_ONCE_SECONDS
        if failure.exitcode < 0 and failure.exitcode not in _CONSEQUENCES and at_once:
            hint = " (often the kernel, out of memory)" if failure.exitcode == -signal.SIGKILL else ""
            return f"rank {rank} was killed by {failure.signal_name()}{hint}"
    return None


def _reported(failures: dict[int, ProcessFailure]) -> str:
    """What the first rank that failed said of it, in one line."""
    directory = os.environ.get(ERRORS_VARIABLE)
    if directory and (said := first_failure(Path(directory))) and "rank" in said:
        return f"rank {said['rank']} failed: {' '.join((said['type'] + ': ' + said['message']).split())}"
    rank, failure = min(failures.items(), key=lambda item: item[1].timestamp)
    return f"rank {rank} failed with exit status {failure.exitcode}"


def _is_final(result: RunResult) -> bool:
    """A rank says so by its exit code, or did by its word when others that lost it end before it does."""
    failures = result.failures.values()
    if any(failure.exitcode in FINAL_CODES for failure in failures):
        return True
    # torchrun ends the others by SIGTERM itself, and then lists them too.
    if min(failures, key=lambda failure: failure.timestamp).exitcode == -signal.SIGTERM:
        return True
    directory = os.environ.get(ERRORS_VARIABLE)
    failure = first_failure(Path(directory)) if directory else None
    return failure is not None and failure["kind"] == "user"
