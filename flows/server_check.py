"""``mcaflow server check``: what is wrong with the configured server, and with this machine as its client."""

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import prefect
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import ObjectNotFound

from flows import automations, gpu
from flows.deployments import heartbeat_seconds
from flows.server import require_server
from flows.server_settings import FILESYSTEM_LEASES

_SHARED_LEASES = (FILESYSTEM_LEASES, "prefect_redis.lease_storage")


def check_server(pool: str) -> int:
    """Print each problem on a line; returns how many there are."""
    url = require_server()
    with get_client(sync_client=True) as client:
        problems = list(find_problems(client, pool))
    for problem in problems:
        print(f"wrong: {problem}")
    if not problems:
        print(f"{url}: nothing is wrong")
    return len(problems)


def find_problems(client: SyncPrefectClient, pool: str) -> Iterator[str]:
    """Each as `setting or thing: what is wrong and what to do`."""
    version = client.api_version()
    if version != prefect.__version__:
        yield f"version: the server is Prefect {version}, this is {prefect.__version__}; use one version everywhere"
    yield from _server_problems(client.request("GET", "/admin/settings").json()["server"])
    yield from _client_problems()
    yield from _missing_parts(client, pool)


def _server_problems(settings: dict[str, Any]) -> Iterator[str]:
    api = settings["api"]
    if not api["auth_string"]:
        yield (
            "PREFECT_SERVER_API_AUTH_STRING: not set; whoever reaches the port can run code on the workers. Set "
            "USER:PASSWORD for the server, and PREFECT_API_AUTH_STRING for workers and command lines"
        )
    if not api["csrf_protection_enabled"]:
        yield "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED: false; pages of other sites can start runs; set true"
    if api["cors_allowed_origins"] == "*":
        yield "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS: any site may read answers; set the address of the UI"
    if settings["concurrency"]["lease_storage"] not in _SHARED_LEASES:
        yield (
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE: in memory, so a restart of the server ends scheduled runs; set "
            f"{FILESYSTEM_LEASES}"
        )
    if "flow_runs" not in (settings["services"]["db_vacuum"]["enabled"] or ()):
        yield "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED: old runs are kept for ever; set events,flow_runs"
    if settings["analytics_enabled"]:
        yield "PREFECT_SERVER_ANALYTICS_ENABLED: the server reports to its makers; set false"


def _client_problems() -> Iterator[str]:
    if os.environ.get("PREFECT_API_KEY"):
        yield "PREFECT_API_KEY: set; it is sent in place of PREFECT_API_AUTH_STRING, so the server refuses; unset it"


def _missing_parts(client: SyncPrefectClient, pool: str) -> Iterator[str]:
    for name in (automations.ZOMBIE, automations.ALERT):
        if not any(found.enabled for found in client.read_automations_by_name(name)):
            how = "mcaflow server setup" + (" --notify URL" if name == automations.ALERT else "")
            yield f"automation {name!r}: absent or switched off; {how}"
    for found in client.read_automations_by_name(automations.ZOMBIE):
        within, beat = found.trigger.within, timedelta(seconds=heartbeat_seconds())
        if within < 3 * beat:
            yield (
                f"automation {automations.ZOMBIE!r}: calls runs dead after {within.total_seconds():.0f} s, and those "
                f"of this machine give a sign of life every {beat.total_seconds():.0f} s; have one "
                "PREFECT_FLOWS_HEARTBEAT_FREQUENCY everywhere, then mcaflow server setup"
            )
    try:
        idle = why_idle(client, pool)
    except ObjectNotFound:
        yield f"work pool {pool}: absent; mcaflow server setup"
        return
    if idle is not None:
        yield f"work pool {pool}: {idle}"
    try:
        client.read_global_concurrency_limit_by_name(gpu.LIMIT)
    except ObjectNotFound:
        if gpu.count():
            yield f"limit {gpu.LIMIT}: absent, so trainings share the GPUs; mcaflow server setup"


def why_idle(client: SyncPrefectClient, pool: str) -> str | None:
    """Why the pool's runs are not started, and what to do. Raises ObjectNotFound where there is no such pool."""
    if client.read_work_pool(pool).is_paused:
        return f"paused; prefect work-pool resume {pool}"
    if not any(worker.status == "ONLINE" for worker in client.read_workers_for_work_pool(pool)):
        return f"no worker is online; prefect worker start --pool {pool}"
    return None
