"""Settings of Prefect that keep known failures away, each with its reason. The environment wins over all of them.

`mcaflow server up` applies them, `mcaflow server check` looks for them, and deployments/ repeats them for systemd and
containers; a test compares.
"""

import os

from mca_lib.errors import ConfigError

FILESYSTEM_LEASES = "prefect.server.concurrency.lease_storage.filesystem"

SERVER = {
    "PREFECT_SERVER_API_HOST": "127.0.0.1",
    # In memory, a restart of the server ends every run whose deployment has a concurrency limit (Prefect 3.9).
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": FILESYSTEM_LEASES,
    # A page of another site could otherwise start runs from the browser of somebody who has the UI open.
    "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
    # Events and runs beyond their retention (7 and 90 days) are deleted; without, the database only grows.
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}

CLIENT = {
    # A server that is away for half an hour must not fail a training that took days.
    "PREFECT_CLIENT_MAX_RETRIES": "10",
    # The run gets its signs of life to the server in time for `flows.automations`.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "60",
    "DO_NOT_TRACK": "1",
}
"""For workers, and what they start. They also need PREFECT_RESULTS_LOCAL_STORAGE_PATH, a folder that stays."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def apply(port: int) -> str:
    """Complete this process's environment for a server on `port` and its clients; returns the URL of its API.

    To be called before Prefect is imported, which reads its settings then.

    Raises:
        ConfigError: others could reach the server, and nothing would keep them out.
    """
    env = os.environ
    host = env.setdefault("PREFECT_SERVER_API_HOST", SERVER["PREFECT_SERVER_API_HOST"])
    if host not in _LOOPBACK and not env.get("PREFECT_SERVER_API_AUTH_STRING"):
        raise ConfigError(
            f"PREFECT_SERVER_API_HOST: {host} can be reached by others, who could then run code here; set "
            "PREFECT_SERVER_API_AUTH_STRING=USER:PASSWORD, or use 127.0.0.1 behind a proxy with TLS"
        )
    origin = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    # Whatever else the environment names, this is about the server on that port.
    env |= {"PREFECT_SERVER_API_PORT": str(port), "PREFECT_API_URL": f"{origin}/api"}
    addresses = {"PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": origin, "PREFECT_UI_API_URL": f"{origin}/api"}
    for name, value in (SERVER | CLIENT | addresses).items():
        env.setdefault(name, value)
    if "PREFECT_SERVER_API_AUTH_STRING" in env:
        env.setdefault("PREFECT_API_AUTH_STRING", env["PREFECT_SERVER_API_AUTH_STRING"])
    home = env.get("PREFECT_HOME", os.path.expanduser("~/.prefect"))
    env.setdefault("PREFECT_RESULTS_LOCAL_STORAGE_PATH", os.path.join(os.path.abspath(home), "storage"))
    return env["PREFECT_API_URL"]
