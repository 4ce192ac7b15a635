"""Which failures of ranks torchrun answers with a restart of all of them (`--max-restarts`).

    a rank was killed, or failed by a defect      all ranks start again, from the newest whole checkpoint
    a mistake of the user, SIGTERM                no restart: it would end in the same way

torchrun (2.15) restarts after any failure. Its agent is subclassed here, in two methods of its own protocol.
"""

import logging
import os
import signal
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from mca_lib.rank_process import ERRORS_VARIABLE, first_failure, rank_failure

USER_MISTAKE = 2
FINAL_CODES = frozenset({USER_MISTAKE, 128 + signal.SIGTERM, -signal.SIGTERM})
"""Exit codes of ranks after which none is started again."""
log = logging.getLogger(__name__)


class RestartingAgent(LocalElasticAgent):
    """torchrun's agent on one machine, which tells failures that a restart may mend from others."""

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
    if any(failure.exitcode in FINAL_CODES for failure in result.failures.values()):
        return True
    directory = os.environ.get(ERRORS_VARIABLE)
    failure = first_failure(Path(directory)) if directory else None
    return failure is not None and failure["kind"] == "user"
