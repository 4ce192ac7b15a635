"""Bodies of the CLI's commands: read, decide by calling the library, print."""

import json
import os
import re
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from flows.console import make_console, plain_table
from flows.recipe import PipelineConfig, load_recipe
from mca_lib.errors import ConfigError
from mca_lib.evaluation.report import comparison, note
from tasks.store import Artifact, ArtifactStore, Lineage

if TYPE_CHECKING:
    from flows.pipeline import PipelineResult

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


def run_recipe(recipe: Path, overrides: list[str], refresh: list[str]) -> None:
    """``mcaflow run``."""
    from flows.graph import nodes_of

    config = load_recipe(recipe, overrides)
    stages = nodes_of(config)
    for stage in refresh:
        if stage not in stages:
            raise ConfigError(f"--refresh {stage}: no such stage; one of {', '.join(stages)}")
    from flows.preflight import check_recipe

    check_recipe(config)
    # Prefect ends the stages at a SIGTERM and sends it once more; by default that would end the process on the spot,
    # with the terminal's cursor hidden and nothing cleared away.
    signal.signal(signal.SIGTERM, _terminated)
    for name, value in PREFECT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    from flows.console import run_console
    from flows.pipeline import pipeline
    from flows.server import provide_server
    from tasks.errors import LeaseLost, StageFailed

    provide_server()
    console = make_console()
    try:
        with run_console(console):
            result = pipeline(config, refresh=refresh)
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


def show_plan(recipe: Path, overrides: list[str]) -> None:
    """``mcaflow plan``."""
    from flows.plan import make_plan
    from flows.preflight import check_recipe

    config = load_recipe(recipe, overrides)
    check_recipe(config)
    marks = {"hit": "[green]hit[/]", "miss": "[yellow]miss[/]", "waits": "waits"}
    table = plain_table("stage", "", "why")
    for row in make_plan(config, ArtifactStore(config.store.path)):
        detail = row.detail[:12] if row.verdict == "hit" else row.detail
        table.add_row(row.stage, marks[row.verdict], "changed since the nearest record:" if row.changed else detail)
        for change in row.changed[:_SHOWN_CHANGES]:
            table.add_row("", "", f"{change.field}: {_short(change.old)} → {_short(change.new)}")
        if len(row.changed) > _SHOWN_CHANGES:
            table.add_row("", "", f"and {len(row.changed) - _SHOWN_CHANGES} more")
        for library in row.libraries:
            table.add_row("", "", f"[dim]made with another version: {library}[/]")
    make_console().print(table)


def list_artifacts(store: Path, stage: str | None) -> None:
    """``mcaflow ls``."""
    table = plain_table("artifact", "files", "size", "made", "took")
    artifacts = ArtifactStore(store, create=False).ls(stage)
    if not artifacts:
        print(f"no artifacts in {store.absolute()}" + (f" of stage {stage}" if stage else ""))
        return
    for artifact in artifacts:
        record = artifact.record
        size = sum(entry.size for entry in record.files.values())
        outside = "" if record.external is None else " (outside)"
        table.add_row(
            f"{artifact.stage}/{artifact.key[:12]}",
            str(len(record.files)),
            human_size(size) + outside,
            _age(record.producer.started),
            f"{record.producer.seconds:.1f} s",
        )
    make_console().print(table)


def show_artifact(store: Path, reference: str) -> None:
    """``mcaflow show``."""
    artifact = find_artifact(ArtifactStore(store, create=False), reference)
    record = artifact.record
    console = make_console()
    console.print(f"[bold]{artifact.stage}/{artifact.key}[/]", highlight=False)
    facts = plain_table("", "", show_header=False)
    facts.add_row("path", str(artifact.path))
    facts.add_row("digest", artifact.digest)
    facts.add_row("made", f"{record.producer.started} on {record.producer.host} in {record.producer.seconds:.1f} s")
    facts.add_row("with", ", ".join(f"{name} {version}" for name, version in record.producer.libraries.items()))
    console.print(facts)
    for title, content in (("key is made of", record.payload), ("statistics", record.stats)):
        console.print(f"[bold]{title}[/]")
        console.print_json(json.dumps(content))
    files = plain_table("file", "size", "blake3")
    for name, entry in sorted(record.files.items()):
        files.add_row(name, human_size(entry.size), entry.digest[:16])
    console.print(files)


def show_lineage(store: Path, reference: str) -> None:
    """``mcaflow lineage``."""
    opened = ArtifactStore(store, create=False)
    make_console().print(_branch(opened.lineage(find_artifact(opened, reference))), highlight=False)


def verify_artifacts(store: Path, reference: str | None, *, full: bool) -> None:
    """``mcaflow verify``; exit code 1 when something is damaged."""
    from tasks.verify import Damage

    opened = ArtifactStore(store, create=False)
    if reference is None:
        checked = list(opened.verify(full=full))
    else:
        artifact = find_artifact(opened, reference)
        found = opened.inspect(artifact.stage, artifact.key, full=full)
        checked = [(artifact.stage, artifact.key, found if isinstance(found, Damage) else None)]
    damaged = [damage for _, _, damage in checked if damage]
    for damage in damaged:
        print(damage)
    print(f"{len(checked)} artifacts checked, {len(damaged)} damaged")
    if damaged:
        print("the next run that needs them moves them to quarantine and computes them again")
        sys.exit(1)


def find_artifact(store: ArtifactStore, reference: str) -> Artifact:
    """The artifact of ``STAGE/KEY`` or the first characters of a key; of ``STAGE`` alone, the newest."""
    of_stage = store.ls(reference) if reference.isalpha() else []
    return of_stage[-1] if of_stage else store.find(reference)


def human_size(size: int) -> str:
    """``12.3 MB``: decimal units, as disks are sold."""
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _print_result(console: Console, config: PipelineConfig, result: "PipelineResult") -> None:
    stages = plain_table("stage", "", "seconds", "artifact")
    for name, outcome in result.outcomes.items():
        mark = "[green]cached[/]" if outcome.cached else "computed"
        stages.add_row(name, mark, f"{outcome.seconds:.1f}", f"{name}/{outcome.artifact.key[:12]}")
    console.print()
    console.print(stages)
    from flows.report import evaluation_metrics, hybrid_summary, is_worse

    if summary := hybrid_summary(config, result.outcomes):
        console.print(f"\nhybrid {summary}", highlight=False, markup=False, soft_wrap=True)
    evaluation = result.outcomes["evaluate"].artifact
    metrics = evaluation_metrics(evaluation)
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
    console.print()
    for name, path in (
        ("data, with its loss tokens marked", result.outcomes["dataset"].artifact.path / "preview.md"),
        ("answers of both models", evaluation.path / "report.md"),
        ("model", result.outcomes["export"].artifact.path),
    ):
        console.print(f"{name}: {path}", highlight=False, soft_wrap=True)


def _branch(node: Lineage) -> Tree:
    name = f"{node.role + ': ' if node.role else ''}{node.stage}/{node.key[:12]}"
    gone = "" if node.artifact else "  (no longer in the store)"
    replaced = "  (replaced by a refresh since; what was used is gone)" if node.replaced else ""
    tree = Tree(name + gone + replaced + _where(node.artifact))
    for parent in node.inputs:
        tree.children.append(_branch(parent))
    return tree


def _where(artifact: Artifact | None) -> str:
    return f"  {artifact.path}" if artifact and artifact.record.external else ""


def _short(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value):
        return value[:12]  # a digest
    text = "absent" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _age(started: str) -> str:
    seconds = (datetime.now(UTC) - datetime.fromisoformat(started)).total_seconds()
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
