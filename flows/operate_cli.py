"""The commands that run mcaflow as a service, as typer sees them: deployments, and the server of one machine."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Overlap(StrEnum):
    """What a scheduled run does when the one before it still runs."""

    refuse = "refuse"
    queue = "queue"


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(deploy)
    app.add_typer(server, name="server")


def deploy(
    recipes: Annotated[list[Path], typer.Argument(metavar="RECIPE...", help="YAML recipes.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a field of the recipes.")
    ] = None,
    cron: Annotated[str | None, typer.Option(help="Also run by the clock, for instance '0 3 * * *'.")] = None,
    timezone: Annotated[
        str | None, typer.Option(help="Of --cron, for instance Europe/Berlin.", show_default="UTC")
    ] = None,
    overlap: Annotated[
        Overlap | None,
        typer.Option(
            help="A --cron run that comes while the last one runs is cancelled, or waits.", show_default="refuse"
        ),
    ] = None,
    watch: Annotated[
        str | None, typer.Option(metavar="EVERY", help="Look so often, say 15m, whether data or model have changed.")
    ] = None,
    evaluate_only: Annotated[
        bool, typer.Option("--evaluate-only", help="A deployment more that evaluates what is trained.")
    ] = False,
    pool: Annotated[str, typer.Option(help="Work pool; one of processes is made where there is none.")] = "mcaflow",
) -> None:
    """Register recipes as deployments of a Prefect server (PREFECT_API_URL); schedules not named here are removed."""
    from mca_lib.errors import ConfigError

    for option, value in (("--timezone", timezone), ("--overlap", overlap)):
        if value is not None and cron is None:
            raise ConfigError(f"{option} {value}: without --cron it has no effect; add --cron, or leave it out")
    from flows.deploy import deploy_recipes
    from flows.deployments import Timing
    from flows.store_commands import seconds_of

    seconds = seconds_of(watch) if watch is not None else None
    timing = Timing(cron, timezone or "UTC", (overlap or Overlap.refuse).value, seconds, evaluate_only)
    deploy_recipes(recipes, overrides or [], timing, pool=pool)


server = typer.Typer(help="The Prefect server of one machine.", no_args_is_help=True)

Pool = Annotated[str, typer.Option(help="Work pool.")]
Port = Annotated[
    int, typer.Option(min=1, max=65535, envvar="PREFECT_SERVER_API_PORT", help="Of the server's API and UI.")
]
Gpus = Annotated[
    int | None, typer.Option(min=0, help="Slots of the limit that trainings share; default: the GPUs of this machine.")
]
Notify = Annotated[
    str | None,
    typer.Option(
        envvar="MCAFLOW_NOTIFY",
        help="Who is told of failed runs: URL of a webhook, or TYPE/NAME of a notification block of the server.",
    ),
]


@server.command()
def up(
    port: Port = 4200,
    pool: Pool = "mcaflow",
    worker: Annotated[bool, typer.Option("--worker", help="Start a worker beside the server.")] = False,
    gpus: Gpus = None,
    notify: Notify = None,
) -> None:
    """Run a server for this machine in the foreground. Ctrl-C waits for what runs; a second one cancels it."""
    from flows import server_settings

    url = server_settings.apply(port)
    from flows.server_up import Setup, serve

    serve(Setup(url, pool, worker, _gpus(gpus), notify))


@server.command()
def start(port: Port = 4200) -> None:
    """Become the server alone, with its settings; for systemd and containers."""
    from flows import server_settings

    server_settings.apply(port)
    from flows.server_up import start_alone

    start_alone()


@server.command()
def setup(pool: Pool = "mcaflow", gpus: Gpus = None, notify: Notify = None) -> None:
    """Give the configured server its work pool, GPU limit and automations."""
    from flows.server_setup import set_up

    set_up(pool, _gpus(gpus), notify)


@server.command()
def check(pool: Pool = "mcaflow") -> None:
    """Say what is wrong with the configured server; exit code 1 when something is."""
    from flows.server_check import check_server

    if check_server(pool):
        raise typer.Exit(1)


@server.command()
def drain(
    pool: Pool = "mcaflow",
    timeout: Annotated[
        str | None, typer.Option(help="Cancel what still runs after so long, say 10m; without it, wait.")
    ] = None,
) -> None:
    """Pause a whole work pool, with all its workers, and wait until nothing of it runs, before workers are stopped."""
    from flows.drain import drain_pool
    from flows.store_commands import seconds_of

    drain_pool(pool, seconds_of(timeout) if timeout is not None else None)


def _gpus(given: int | None) -> int:
    if given is not None:
        return given
    from flows.gpu import count

    return count()
