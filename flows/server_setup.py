"""``mcaflow server setup``: what a server needs beside its settings; found again by name, so it can be given again."""

from prefect.client.orchestration import get_client

from flows import automations, drain, gpu
from flows.deploy import ensure_pool
from flows.server import require_server


def set_up(pool: str, gpus: int, notify: str | None) -> None:
    """Work pool (not paused), GPU limit and automations of the configured server.

    Args:
        gpus: Slots of the limit; with 0, no limit is made and one that exists stays as it is.
        notify: See `automations.install`.
    """
    require_server()
    with get_client(sync_client=True) as client:
        ensure_pool(client, pool)
        drain.pause(client, pool, paused=False)
        if gpus:
            client.upsert_global_concurrency_limit_by_name(gpu.LIMIT, gpus)
        automations.install(client, notify)
