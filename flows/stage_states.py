"""What the Prefect UI shows of a stage beside its log: a name that tells the artifact, a reason without a traceback."""

from prefect.context import TaskRunContext
from prefect.states import Failed, State

from flows.artifact_commands import human_size
from mca_lib.errors import UserError
from tasks.errors import LeaseLost, StageFailed
from tasks.store import Artifact

EXPECTED = (UserError, StageFailed, LeaseLost)
"""Errors whose message says all. Whatever else escapes is a defect, and Prefect logs where it came from."""


def failed(error: Exception, stage: str | None = None) -> State:
    """The state `Failed` with the message of an expected error, to be returned where raising it would log a traceback.

    Its `result()` raises the error. The message starts with the stage, here and where the error arrives later.
    """
    if stage is not None:
        error.add_note(stage)
    message, notes = str(error), getattr(error, "__notes__", [])
    if notes and not message.startswith(f"{notes[0]}: "):
        message = f"{notes[0]}: {message}"
    return Failed(message=message, data=error)


def name_task(stage: str, artifact: Artifact) -> None:
    """Rename the task run that runs: ``train 750aaa5a, 1.2 MB``."""
    size = sum(entry.size for entry in artifact.record.files.values())
    context = TaskRunContext.get()
    if context is not None:
        # Goes to the server with the final state (Prefect 3.9).
        context.task_run.name = f"{stage} {artifact.key[:8]}, {human_size(size)}"
