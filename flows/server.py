"""The Prefect server of a run: the configured one, or a temporary one of its own (`flows.temporary_server`)."""

import httpx
from prefect.client.base import ServerType, determine_server_type
from prefect.client.orchestration import get_client
from prefect.context import refresh_global_settings_context
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, PREFECT_HOME

from flows import temporary_server
from mca_lib.errors import ConfigError


def provide_server(starting: temporary_server.Starting | None = None) -> None:
    """Make sure that a Prefect server answers: the configured one, or a temporary one that ends with this process.

    To be called in the main thread, as `temporary_server.start`.

    Args:
        starting: A temporary one that was started before Prefect was imported.

    Raises:
        ConfigError: the configured server does not answer, or a temporary one cannot run here.
    """
    if starting is None:
        if determine_server_type() != ServerType.EPHEMERAL:
            _require_answer(PREFECT_API_URL.value(), ", or unset the variable to run with a temporary one")
            return
        starting = temporary_server.start(PREFECT_HOME.value())
        refresh_global_settings_context()
    try:
        temporary_server.await_answer(starting)
    except RuntimeError as error:
        raise ConfigError(
            f"Prefect's temporary server did not start ({error}); see PREFECT_HOME={PREFECT_HOME.value()}, or start a "
            "server (prefect server start) and name it in PREFECT_API_URL"
        ) from error


def require_server() -> str:
    """URL of the configured server, which answers and lets us in.

    Raises:
        ConfigError: none is configured, it does not answer, or it wants other credentials.
    """
    url = PREFECT_API_URL.value()
    if determine_server_type() == ServerType.EPHEMERAL or not url:
        raise ConfigError(
            "PREFECT_API_URL: not set; start a server (mcaflow server up), then "
            "export PREFECT_API_URL=http://127.0.0.1:4200/api"
        )
    _require_answer(url)
    return url


def _require_answer(url: str | None, or_else: str = "") -> None:
    try:
        httpx.get(f"{url}/health", timeout=10)
        # Its health is never asked for credentials.
        with get_client(sync_client=True) as client:
            client.api_version()
    except PrefectHTTPStatusError as error:
        given = "are not accepted" if PREFECT_API_AUTH_STRING.value() else "are missing"
        hint = f"the credentials in PREFECT_API_AUTH_STRING {given}" if error.response.status_code == 401 else error
        raise ConfigError(f"PREFECT_API_URL: the server at {url} refuses: {hint}") from None
    except httpx.HTTPError as error:
        raise ConfigError(
            f"PREFECT_API_URL: no Prefect server answers at {url} ({error}); start it (mcaflow server up){or_else}"
        ) from None
