"""``mcaflow deploy``: bring a server to have exactly the deployments that the command line asks for.

Deployments are found again by their names, so the command can be given as often as one likes. What it no longer asks
for loses its schedule, and the runs that were planned for it; the deployment stays, so that its past runs can be
looked at and retried.
"""

import warnings
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy, WorkPool
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.deployments.runner import DeploymentApplyError, EntrypointType, RunnerDeployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_DEPLOYMENTS_CLEAR_SCHEDULES_ON_EMPTY, temporary_settings
from pydantic import ValidationError

from flows.deployments import POOL, Deployment, Timing, deployments_of, job_variables
from flows.preflight import check_recipe
from flows.recipe import PipelineConfig, load_recipe
from flows.server import require_server
from flows.server_check import why_idle
from mca_lib.errors import ConfigError

_STRATEGY = {"refuse": ConcurrencyLimitStrategy.CANCEL_NEW, "queue": ConcurrencyLimitStrategy.ENQUEUE}


def deploy_recipes(recipes: Sequence[Path], overrides: list[str], timing: Timing, *, pool: str = POOL) -> None:
    """Register the recipes' deployments, after all of them have been found right.

    Raises:
        ConfigError: a recipe or schedule is wrong, two have the same name, or no server answers.
    """
    configs = [load_recipe(path, overrides) for path in recipes]
    for path, config in zip(recipes, configs, strict=True):
        check_recipe(config)
        if sum(other.name == config.name for other in configs) > 1:
            raise ConfigError(
                f"recipe {path}: another recipe is named {config.name!r} too; names tell deployments apart"
            )
    _check_timing(timing)
    require_server()
    try:
        with get_client(sync_client=True) as client:
            ensure_pool(client, pool)
            for config in configs:
                for deployment in deployments_of(config, timing):
                    _apply(client, deployment, config, pool)
            if (idle := why_idle(client, pool)) is not None:
                print(f"work pool {pool}: {idle}; until then its runs wait")
    except (httpx.HTTPError, PrefectHTTPStatusError, DeploymentApplyError) as error:
        raise ConfigError(f"the Prefect server refused a deployment: {' '.join(str(error).split())}") from error


def ensure_pool(client: SyncPrefectClient, name: str) -> WorkPool:
    """The work pool; one of processes is created where there is none. A pool of another kind is used as it is."""
    try:
        return client.read_work_pool(name)
    except ObjectNotFound:
        from prefect.workers.process import ProcessWorker

        template = ProcessWorker.get_default_base_job_template()
        return client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))


def _check_timing(timing: Timing) -> None:
    try:
        if timing.cron is not None:
            CronSchedule(cron=timing.cron, timezone=timing.timezone)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"--cron {timing.cron!r} --timezone {timing.timezone}: {message}") from None
    if timing.watch_seconds is not None and timing.watch_seconds < 60:
        raise ConfigError(
            f"--watch: {timing.watch_seconds:g} seconds; every minute at most, and a number alone is of seconds: 15m"
        )


def _apply(client: SyncPrefectClient, deployment: Deployment, config: PipelineConfig, pool: str) -> None:
    registered = _registered(deployment, config, pool)
    if not deployment.wanted:
        _remove_schedules(client, registered.full_name)
        return
    schedules = [{"schedule": schedule, "slug": slug} for slug, schedule in _schedules(deployment).items()]
    with temporary_settings({PREFECT_DEPLOYMENTS_CLEAR_SCHEDULES_ON_EMPTY: True}), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        registered.apply(schedules=schedules)
    when = f"  {deployment.cron} {deployment.timezone}" if deployment.cron else ""
    every = f"  every {timedelta(seconds=deployment.interval_seconds)}" if deployment.interval_seconds else ""
    print(f"{registered.full_name}{when}{every}")


def _registered(deployment: Deployment, config: PipelineConfig, pool: str) -> RunnerDeployment:
    module, _, name = deployment.flow.rpartition(".")
    flow = getattr(import_module(module), name)
    limit = (
        ConcurrencyLimitConfig(limit=1, collision_strategy=_STRATEGY[deployment.overlap])
        if deployment.overlap
        else None
    )
    return RunnerDeployment.from_flow(
        flow,
        deployment.name,
        parameters=deployment.parameters,
        description=deployment.description,
        tags=["mcaflow"],
        concurrency_limit=limit,
        work_pool_name=pool,
        job_variables=job_variables(config),
        entrypoint_type=EntrypointType.MODULE_PATH,
    )


def _schedules(deployment: Deployment) -> dict[str, CronSchedule | IntervalSchedule]:
    """By slug, under which a schedule is found again."""
    found: dict[str, CronSchedule | IntervalSchedule] = {}
    if deployment.cron:
        found["cron"] = CronSchedule(cron=deployment.cron, timezone=deployment.timezone)
    if deployment.interval_seconds:
        found["interval"] = IntervalSchedule(interval=timedelta(seconds=deployment.interval_seconds))
    return found


def _remove_schedules(client: SyncPrefectClient, full_name: str) -> None:
    try:
        deployment = client.read_deployment_by_name(full_name)
    except ObjectNotFound:
        return
    for schedule in deployment.schedules:
        client.delete_deployment_schedule(deployment.id, schedule.id)
        print(f"{full_name}  schedule removed")
