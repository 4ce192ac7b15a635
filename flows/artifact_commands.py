"""Bodies of the commands that look into a store: ls, show, lineage, verify."""

import json
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from rich.tree import Tree

from flows.console import make_console, plain_table
from flows.run_page import report_path
from tasks.ledger import Entry, users
from tasks.store import Artifact, ArtifactStore, Lineage


def list_artifacts(store: Path, stage: str | None) -> None:
    """``mcaflow ls``."""
    table = plain_table("artifact", "files", "size", "made", "took", "used by")
    opened = ArtifactStore(store, create=False)
    artifacts, used = opened.ls(stage), users(opened)
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
            ", ".join(_recipes(used.get((artifact.stage, artifact.key), []))),
        )
    make_console().print(table)


def show_artifact(store: Path, reference: str) -> None:
    """``mcaflow show``."""
    opened = ArtifactStore(store, create=False)
    artifact = find_artifact(opened, reference)
    record, runs = artifact.record, users(opened).get((artifact.stage, artifact.key), [])
    console = make_console()
    console.print(f"[bold]{artifact.stage}/{artifact.key}[/]", highlight=False)
    facts = plain_table("", "", show_header=False)
    facts.add_row("path", str(artifact.path))
    if artifact.stage == "evaluate" and (page := report_path(opened, artifact)):
        facts.add_row("report", str(page))
    facts.add_row("digest", artifact.digest)
    facts.add_row("made", f"{record.producer.started} on {record.producer.host} in {record.producer.seconds:.1f} s")
    facts.add_row("with", ", ".join(f"{name} {version}" for name, version in record.producer.libraries.items()))
    if runs:
        facts.add_row("used by", ", ".join(f"{name} ({_times(count)})" for name, count in _recipes(runs).items()))
        facts.add_row("last used", runs[0].started)
    console.print(facts)
    # A curve's points are for the report.
    statistics = {name: value for name, value in record.stats.items() if name != "curves"}
    for title, content in (("key is made of", record.payload), ("statistics", statistics)):
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


def _recipes(runs: list[Entry]) -> Counter[str]:
    """Names of recipes with their number of runs, those that ran last first."""
    return Counter(run.name for run in runs)


def _times(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


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


def _age(started: str) -> str:
    seconds = (datetime.now(UTC) - datetime.fromisoformat(started)).total_seconds()
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
