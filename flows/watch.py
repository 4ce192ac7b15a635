"""A light flow that starts a pipeline's deployment when the data or the model has changed, and else does nothing.

It asks `make_plan`, as `mcaflow plan` does: files are looked at (one that is as it was is not read again), a hub is
asked for its commit, nothing is computed, and neither torch nor Megatron is loaded.

A state of data, model and recipe is tried once: a run that waits, runs or has failed is not started a second time. A
failed one is retried by a person, or by the next change.
"""

from prefect import flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Completed, State

from flows import hooks
from flows.graph import nodes_of
from flows.plan import make_plan
from flows.recipe import PipelineConfig
from mca_lib.errors import ConfigError
from tasks.canonical import JSON, blake3_hex, canonical_json
from tasks.report import LogReporter
from tasks.stage import Hit, probe
from tasks.store import ArtifactStore


def _run_name() -> str:
    config = flow_run.parameters.get("config")
    name = config["name"] if isinstance(config, dict) else config.name
    return f"{name} · watch {flow_run.scheduled_start_time:%Y-%m-%d %H:%M}"


@flow(name="mcaflow-watch", flow_run_name=_run_name, persist_result=False, **hooks.HOOKS)
def watch(config: PipelineConfig, deployment: str) -> State[None]:
    """Start `deployment` when the store lacks something that the recipe makes.

    Args:
        config: The recipe; the run that is started gets the same.
        deployment: FLOW/NAME of the deployment that runs it.
    """
    message = look(config, deployment)
    get_run_logger().info(message)
    return Completed(message=message, data=None)


def look(config: PipelineConfig, deployment: str) -> str:
    """What was found and done, in one line."""
    store = config.store.open()
    missing = next((row for row in make_plan(config, store) if row.verdict == "miss"), None)
    if missing is None:
        return "nothing changed"
    tag = f"state:{state_of(config, store)}"
    earlier = _latest(deployment, tag)
    why = f"{missing.stage}: {missing.detail}"
    if earlier is not None and earlier.state is not None and not earlier.state.is_completed():
        ending = "is retried by hand, or after the next change" if earlier.state.is_final() else "is not finished"
        return f"{why}; run {earlier.name}, which is {earlier.state.name}, {ending}"
    started = run_deployment(
        deployment,
        parameters={"config": config.model_dump(mode="json", exclude_unset=True)},
        timeout=0,
        tags=[tag],
        as_subflow=False,
    )
    return f"{why}; started {started.name}"


def state_of(config: PipelineConfig, store: ArtifactStore) -> str:
    """Digest of the recipe, the model and the data as they are now."""
    seen: list[JSON] = [config.model_dump(mode="json")]
    nodes = nodes_of(config)
    download = nodes["download"].build({})
    seen.append(download.resolve(store, LogReporter("download")).identity())
    found = probe(store, download)
    if isinstance(found, Hit):
        data = nodes["dataset"].build({"download": found.artifact})
        seen.append(data.resolve(store, LogReporter("dataset")).identity())
    return blake3_hex(canonical_json(seen), 16)


def _latest(deployment: str, tag: str) -> FlowRun | None:
    """The newest run of the deployment that was started for this state."""
    with get_client(sync_client=True) as client:
        try:
            found = client.read_deployment_by_name(deployment)
        except ObjectNotFound:
            raise ConfigError(f"deployment: the server has no {deployment}; register it with mcaflow deploy") from None
        runs = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                deployment_id=FlowRunFilterDeploymentId(any_=[found.id]), tags=FlowRunFilterTags(all_=[tag])
            ),
            sort=FlowRunSort.EXPECTED_START_TIME_DESC,
            limit=1,
        )
    return runs[0] if runs else None
