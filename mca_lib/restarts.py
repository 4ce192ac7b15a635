"""Which failures of ranks torchrun answers with a restart of all of them (`--max-restarts`).

    a rank was killed, or failed by a defect      all ranks start again, from the newest whole checkpoint
    a mistake of the user, SIGTERM                no restart: it would end in the same way

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

from mca_lib.rank_process import ERRORS_VARIABLE, first_failure, rank_failure

FINAL_CODES = frozenset({2, 128 + signal.SIGTERM})
"""Exit codes by which a rank says that it is not to be started again: a mistake of the user, and stopped by SIGTERM."""
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
        if result.state is WorkerState.FAILED and _is_final(result):
            self._remaining_restarts = 0
        return result

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """A failure that this attempt may recover from goes to the log, and is no longer the cause of anything."""
        directory = os.environ.get(ERRORS_VARIABLE)
        for worker in worker_group.workers if directory else ():
            path = rank_failure(Path(directory), worker.global_rank)
            if path.exists():
                log.warning("all ranks are started again after: %s", path.read_text())
                path.unlink()
        return super()._start_workers(worker_group)


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
