"""Automations of the server: what happens to runs that nobody is running any more, and who is told of failures.

The server recognizes a dead run by the absence of its heartbeats. `zombie_within` is several of them: with fewer, a
machine that is busy for a minute has a healthy run called Crashed while it goes on.
"""

from datetime import timedelta

from prefect.automations import Automation, AutomationCore, EventTrigger, Posture
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from prefect.states import StateType

from flows.deployments import heartbeat_seconds
from mca_lib.errors import ConfigError

ZOMBIE = "mcaflow: runs without a sign of life"
ALERT = "mcaflow: failed runs"
BLOCK = "mcaflow-alerts"
FLOWS = ["mcaflow", "mcaflow-evaluate", "mcaflow-watch"]

_OF_OURS = ResourceSpecification.model_validate({"prefect.resource.role": "flow", "prefect.resource.name": FLOWS})
_RUNS = ResourceSpecification.model_validate({"prefect.resource.id": ["prefect.flow-run.*"]})
_SUBJECT = "{{ flow_run.name }}: {{ flow_run.state.name }}"
_BODY = """{{ flow_run.state.message }}

To go on from what is finished: prefect flow-run retry {{ flow_run.id }}
{{ flow_run|ui_url }}"""


def install(client: SyncPrefectClient, notify: str | None) -> None:
    """Create the automations, or change those that are out of date.

    Args:
        notify: URL of a webhook that gets `{"text": …}`, or TYPE/NAME of a notification block of the server, such as
            slack-webhook/ops; None leaves the alert as it is.

    Raises:
        ConfigError: there is no such block.
    """
    _put(client, zombies())
    if notify is not None:
        _put(client, alerts(client, notify))


def zombie_within() -> timedelta:
    """For which a run may be silent."""
    return timedelta(seconds=4 * heartbeat_seconds())


def zombies() -> AutomationCore:
    """Runs whose heartbeat has stopped become Crashed."""
    within = zombie_within()
    trigger = EventTrigger(
        after={"prefect.flow-run.heartbeat"},
        expect={"prefect.flow-run.*"},
        match=_RUNS,
        match_related=_OF_OURS,
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=within,
    )
    message = f"No sign of life for {within.total_seconds():.0f} s: its process or its machine is gone."
    action = ChangeFlowRunState(state=StateType.CRASHED, message=message)
    return AutomationCore(
        name=ZOMBIE,
        description=f"Without a heartbeat for {within.total_seconds():.0f} s a run is Crashed.",
        trigger=trigger,
        actions=[action],
    )


def alerts(client: SyncPrefectClient, notify: str) -> AutomationCore:
    """Failed and crashed runs are told of."""
    block_id = _webhook(notify) if "://" in notify else _block(client, notify)
    trigger = EventTrigger(
        expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed", "prefect.flow-run.TimedOut"},
        match=_RUNS,
        match_related=_OF_OURS,
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        threshold=1,
        within=timedelta(0),
    )
    where = BLOCK if "://" in notify else notify
    action = SendNotification(block_document_id=block_id, subject=_SUBJECT, body=_BODY)
    return AutomationCore(
        name=ALERT,
        description=f"Failed and crashed runs are sent to the block {where}.",
        trigger=trigger,
        actions=[action],
    )


def _put(client: SyncPrefectClient, wanted: AutomationCore) -> None:
    """An automation that is as it should be is left alone: a change forgets which runs it was watching."""
    found: list[Automation] = client.read_automations_by_name(wanted.name)
    if not found:
        client.create_automation(wanted)
    elif found[0].description != wanted.description or found[0].actions != wanted.actions:
        client.update_automation(found[0].id, wanted)


def _webhook(url: str) -> str:
    """The block that posts to the URL."""
    # Those URLs are passwords as a rule: among the secrets, the UI does not show it.
    block = CustomWebhookNotificationBlock(
        name=BLOCK, url="{{webhook}}", secrets={"webhook": url}, json_data={"text": "{{subject}}\n{{body}}"}
    )
    return block.save(BLOCK, overwrite=True)


def _block(client: SyncPrefectClient, slug: str) -> str:
    kind, _, name = slug.partition("/")
    try:
        return client.read_block_document_by_name(name, kind).id
    except ObjectNotFound:
        raise ConfigError(
            f"--notify {slug}: the server has no block of that type and name; make it in the UI, or give a URL"
        ) from None
