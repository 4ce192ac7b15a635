"""What is left of a run that did not come to its end: a page in the Prefect UI, and no process.

Prefect calls these hooks by keyword; those of a run that crashed or was cancelled are called by the worker, in another
process than the run's, so they ask the server for everything.
"""

import re
import textwrap
from collections.abc import Iterator

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.client.schemas.sorting import LogSort, TaskRunSort
from prefect.logging.handlers import APILogHandler

from flows import gpu
from tasks.process import kill_tagged, redact

RUN_ID = "PREFECT__FLOW_RUN_ID"
"""Set by workers for the process of a run, and inherited by all that it starts."""

_LINES = 20
_WIDTH = 72
_WORKER = "prefect.flow_runs.worker"
_OF_PREFECT = re.compile(r"^(Task|Flow) run encountered an exception:? ")
_STOPPED = [StateType.FAILED, StateType.CRASHED, StateType.CANCELLED]


def on_failure(flow: Flow, flow_run: FlowRun, state: State) -> None:
    """The run failed: say why and how it goes on. Called in its own process, which still holds its last lines."""
    APILogHandler().flush()
    leave_page(flow_run, state)


def on_crashed(flow: Flow, flow_run: FlowRun, state: State) -> None:
    """The run's process died: end what it may have left, then say what is known."""
    end(flow_run)
    leave_page(flow_run, state)


def on_cancellation(flow: Flow, flow_run: FlowRun, state: State) -> None:
    """The run was cancelled: as after a crash."""
    end(flow_run)
    leave_page(flow_run, state)


HOOKS = {"on_failure": [on_failure], "on_crashed": [on_crashed], "on_cancellation": [on_cancellation]}
"""For the decorator of a flow."""


def end(flow_run: FlowRun) -> None:
    """No process of the run goes on, and its GPUs are free."""
    kill_tagged(str(flow_run.id), RUN_ID)
    gpu.release_left(flow_run.id)


def leave_page(flow_run: FlowRun, state: State) -> None:
    """Create the artifact `failure` of the run."""
    with get_client(sync_client=True) as client:
        text = redact("\n\n".join(_page(client, flow_run, state)))
        client.create_artifact(
            ArtifactCreate(
                key="failure",
                type="markdown",
                description="Why this run ended, and how it goes on",
                data=text,
                flow_run_id=flow_run.id,
            )
        )


def again(flow_run: FlowRun) -> str:
    """The command that goes on from what is finished."""
    return f"prefect flow-run retry {flow_run.id}" if flow_run.deployment_id else "the same mcaflow run …"


def _page(client: SyncPrefectClient, flow_run: FlowRun, state: State) -> Iterator[str]:
    # The hook is called while the run is still being cancelled.
    yield f"# {flow_run.name}: {StateType.CANCELLED.value.capitalize() if state.is_cancelling() else state.name}"
    stopped = _stopped_tasks(client, flow_run)
    if stopped:
        yield f"Stage: {', '.join(f'**{task.name}** ({task.state_name})' for task in stopped)}"
    messages = [task.state.message for task in stopped if task.state] or [state.message]
    reasons = [_OF_PREFECT.sub("", message) for message in messages if message]
    yield from map(_block, reasons)
    lines = _log_lines(client, flow_run, reasons)
    if lines:
        yield f"The last lines of the log:\n\n{_block(chr(10).join(lines))}"
    yield f"To go on from what is finished:\n\n{_block(again(flow_run))}"


def _block(text: str) -> str:
    """Literal text; indented, for it may itself have fences. Wrapped, for the page cuts long lines off."""
    wrapped = (
        textwrap.wrap(line, _WIDTH, break_long_words=False, break_on_hyphens=False) for line in text.splitlines()
    )
    return "\n".join(f"    {part}" for parts in wrapped for part in parts or [""])


def _stopped_tasks(client: SyncPrefectClient, flow_run: FlowRun) -> list[TaskRun]:
    """Tasks of the run's last attempt that did not end well, the first first."""
    found = client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id])),
        task_run_filter=TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=_STOPPED))),
        sort=TaskRunSort.END_TIME_DESC,
    )
    return [task for task in reversed(found) if task.flow_run_run_count == flow_run.run_count]


def _log_lines(client: SyncPrefectClient, flow_run: FlowRun, reasons: list[str]) -> list[str]:
    """The last lines of the run itself that do not repeat a reason."""
    logs = client.read_logs(
        LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run.id])), limit=_LINES, sort=LogSort.TIMESTAMP_DESC
    )
    known = {form for reason in reasons for form in (reason, repr(reason)[1:-1])}
    ours = [log for log in reversed(logs) if log.name != _WORKER and not any(form in log.message for form in known)]
    return [line for log in ours for line in f"{log.timestamp:%H:%M:%S} {log.message}".splitlines()][-_LINES:]
