"""Bodies of the commands around a recipe, run, plan, check, fields: read, decide by calling the library, print."""

import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin

from rich.console import Console
from rich.markup import escape

from flows.console import make_console, plain_table
from flows.recipe import PipelineConfig, load_recipe
from mca_lib.errors import ConfigError
from mca_lib.evaluation.report import comparison, note

if TYPE_CHECKING:
    from flows.result import PipelineResult

# What `mcaflow run` asks of Prefect; whatever the environment or a profile says already wins.
PREFECT_DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # Lines of the run go to the server; the terminal shows the bars instead.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    # A server that is away for half an hour must not fail a training that took days.
    "PREFECT_CLIENT_MAX_RETRIES": "10",
    # Often enough for the server's automation that calls silent runs Crashed (flows/automations.py).
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "60",
}


_SHOWN_CHANGES = 8
"""So many changed fields are shown of a stage; another model or data set changes all of them."""


def run_recipe(
    recipe: Path, overrides: list[str], *, refresh: list[str], first: str | None = None, until: str | None = None
) -> None:
    """``mcaflow run``."""
    from flows.console import run_console
    from flows.preflight import check_recipe
    from tasks.errors import LeaseLost, StageFailed

    config = load_recipe(recipe, overrides)
    again = _stages_anew(config, refresh, first, until)

    check_recipe(config)
    # Prefect ends the stages at a SIGTERM and sends it once more; by default that would end the process on the spot,
    # with the terminal's cursor hidden and nothing cleared away.
    signal.signal(signal.SIGTERM, _terminated)
    console = make_console()
    try:
        with run_console(console):
            result = _result(config, again, until)
    except (StageFailed, LeaseLost) as error:
        print(f"mcaflow: error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("mcaflow: interrupted; the same command goes on from what is finished", file=sys.stderr)
        sys.exit(130)
    except SystemExit as error:
        if error.code == 128 + signal.SIGTERM:
            print("mcaflow: terminated; the same command goes on from what is finished", file=sys.stderr)
        raise
    _print_result(console, config, result)


def _result(config: PipelineConfig, again: list[str], until: str | None) -> "PipelineResult":
    """Of a run by Prefect; where there is no server and nothing to compute, without it."""
    from flows import temporary_server
    from flows.cached import may_have_server, prefect_home, run_cached

    alone = not may_have_server()
    if alone and not again and (found := run_cached(config, until)) is not None:
        return found
    for name, value in PREFECT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    starting = temporary_server.start(prefect_home()) if alone else None  # while Prefect is imported here
    from flows.pipeline import pipeline
    from flows.server import provide_server

    provide_server(starting)
    return pipeline(config, refresh=again, until=until)


def _stages_anew(config: PipelineConfig, refresh: list[str], first: str | None, until: str | None) -> list[str]:
    """What --refresh and --from ask for, of the stages up to --until; raises ConfigError for a stage not among them."""
    from flows.graph import check_refresh, nodes_until, stages_from

    nodes = nodes_until(config, until)
    asked = set(refresh)
    if first is not None:
        check_refresh(nodes, [first])
        asked |= nodes.keys() & set(stages_from(config, first))
    again = check_refresh(nodes, asked)
    return [name for name in nodes if name in again]


def _terminated(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def check_everything(recipe: Path, overrides: list[str]) -> None:
    """``mcaflow check``."""
    from flows.preflight import check_pending, check_recipe

    config = load_recipe(recipe, overrides)
    check_recipe(config)
    check_pending(config)
    print(f"{recipe}: nothing stands in its way")


def show_fields(section: str | None, *, as_json: bool = False) -> None:
    """``mcaflow fields``."""
    sections = {name: field.annotation for name, field in PipelineConfig.model_fields.items() if name != "name"}
    if section is not None and section not in sections:
        raise ConfigError(f"{section}: no such section; one of {', '.join(sections)}")
    rows = []
    for name in [section] if section else sections:
        identity = sections[name].identity_fields()
        for field, info in sections[name].model_fields.items():
            default = "required" if info.is_required() else _shown(info.get_default(call_default_factory=True))
            choices, meaning = _choices(info.annotation), " ".join((info.description or "").split())
            rows.append((f"{name}.{field}", default, "yes" if field in identity else "no", choices, meaning))
    headings = ("field", "default", "in the key", "choices", "what it says")
    if as_json:
        print(json.dumps([dict(zip(headings, row, strict=True)) for row in rows], indent=1))
        return
    table = plain_table(*headings)
    for row in rows:
        table.add_row(*(escape(cell if isinstance(cell, str) else " | ".join(cell)) for cell in row))
    make_console().print(table)


def _choices(annotation: Any) -> list[str]:
    """The values that a field may have, where they are few; those of a list's items too."""
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _shown(default: Any) -> str:
    """A default as YAML has it; of a section within a section, all its fields."""
    return json.dumps(default, default=lambda section: section.model_dump())


def show_plan(
    recipe: Path, overrides: list[str], *, refresh: list[str], first: str | None = None, until: str | None = None
) -> None:
    """``mcaflow plan``."""
    from flows.plan import make_plan
    from flows.preflight import check_recipe

    config = load_recipe(recipe, overrides)
    again = _stages_anew(config, refresh, first, until)
    check_recipe(config)
    marks = {"hit": "[green]hit[/]", "miss": "[yellow]miss[/]", "waits": "waits"}
    table = plain_table("stage", "", "why")
    for row in make_plan(config, config.store.open(), again, until):
        detail = row.detail[:12] if row.verdict == "hit" else row.detail
        table.add_row(row.stage, marks[row.verdict], "changed since the nearest record:" if row.changed else detail)
        for change in row.changed[:_SHOWN_CHANGES]:
            table.add_row("", "", f"{change.field}: {_short(change.old)} → {_short(change.new)}")
        if len(row.changed) > _SHOWN_CHANGES:
            table.add_row("", "", f"and {len(row.changed) - _SHOWN_CHANGES} more")
        for library in row.libraries:
            table.add_row("", "", f"[dim]made with another version: {library}[/]")
    make_console().print(table)


def _print_result(console: Console, config: PipelineConfig, result: "PipelineResult") -> None:
    stages = plain_table("stage", "", "seconds", "artifact")
    for name, outcome in result.outcomes.items():
        mark = "[green]cached[/]" if outcome.cached else "computed"
        stages.add_row(name, mark, f"{outcome.seconds:.1f}", f"{name}/{outcome.artifact.key[:12]}")
    console.print()
    console.print(stages)
    from flows.run_page import report_path

    if result.hybrid:
        console.print(f"\nhybrid {result.hybrid}", highlight=False, markup=False, soft_wrap=True)
    if result.metrics is not None:
        _print_evaluation(console, result.metrics, result)
    console.print()
    for name, stage, file in (
        ("data, with its loss tokens marked", "dataset", "preview.md"),
        ("answers of both models", "evaluate", "report.md"),
        ("model", "export", ""),
    ):
        if stage in result.outcomes:
            path = result.outcomes[stage].artifact.path / file
            console.print(f"{name}: {path}", highlight=False, soft_wrap=True)
    if "evaluate" in result.outcomes and (
        page := report_path(config.store.open(), result.outcomes["evaluate"].artifact)
    ):
        console.print(f"report: {page}", highlight=False, soft_wrap=True)


def _print_evaluation(console: Console, metrics: Mapping[str, Any], result: "PipelineResult") -> None:
    from flows.report import is_worse

    heading, *rows = comparison(metrics)
    table = plain_table(*heading)
    for row in rows:
        table.add_row(*row)
    console.print()
    if rows:
        console.print(table)
    console.print(note(metrics), style="dim")
    if is_worse(metrics):
        console.print("warning: the trained model is worse than the base model on held-out rows", style="yellow")
    if result.verdict:
        console.print(f"\n{result.verdict.message}", highlight=False, markup=False, soft_wrap=True)


def _short(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value):
        return value[:12]  # a digest
    text = "absent" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
