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
    timezone: Annotated[str, typer.Option(help="Of --cron, for instance Europe/Berlin.")] = "UTC",
    overlap: Annotated[
        Overlap, typer.Option(help="A scheduled run that comes while the last one runs is cancelled, or waits.")
    ] = Overlap.refuse,
    watch: Annotated[
        str | None, typer.Option(metavar="EVERY", help="Look so often, say 15m, whether data or model have changed.")
    ] = None,
    evaluate_only: Annotated[
        bool, typer.Option("--evaluate-only", help="A deployment more that evaluates what is trained.")
    ] = False,
    pool: Annotated[str, typer.Option(help="Work pool; one of processes is made where there is none.")] = "mcaflow",
) -> None:
    """Register recipes as deployments of a Prefect server (PREFECT_API_URL); schedules not named here are removed."""
    from flows.deploy import deploy_recipes
    from flows.deployments import Timing
    from flows.store_commands import seconds_of

    seconds = seconds_of(watch) if watch is not None else None
    timing = Timing(cron, timezone, overlap.value, seconds, evaluate_only)
    deploy_recipes(recipes, overrides or [], timing, pool=pool)


server = typer.Typer(help="The Prefect server of one machine.", no_args_is_help=True)
