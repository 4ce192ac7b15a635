"""What a run leaves in the Prefect UI at its end: the evaluation and the stages, as artifacts of the flow run.

The figures are read from the evaluate artifact, so a run that found everything in the store reports the same.
"""

import json
from collections.abc import Mapping
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from flows.plan import reason_in_recipe_names
from flows.recipe import PipelineConfig
from tasks.stage import Outcome
from tasks.store import Artifact


def publish_report(config: PipelineConfig, outcomes: Mapping[str, Outcome]) -> None:
    """Create the table and the page of this run."""
    evaluation = outcomes["evaluate"].artifact
    heading, *rows = evaluation_rows(evaluation)
    if rows:
        table = [dict(zip(heading, row, strict=True)) for row in rows]
        create_table_artifact(table, key="evaluation", description=evaluation_note(evaluation))
    create_markdown_artifact(_page(config, outcomes), key="run", description="Stages, model and samples of this run")


def evaluation_rows(artifact: Artifact) -> list[list[str]]:
    """The comparison of the models as text: a heading row, then one row per measure."""
    metrics = _metrics(artifact)
    models = metrics["models"]
    rows = [["measure", *models, "change"]]
    if not models:
        return rows
    change = metrics["difference"]
    stderr = change.get("loss_stderr")
    spread = "" if stderr is None else f" ± {stderr:.4f}"
    rows.append(["held-out loss", *(f"{m['loss']:.4f}" for m in models.values()), f"{change['loss']:+.4f}{spread}"])
    rows.append(["perplexity", *(_perplexity(m["perplexity"]) for m in models.values()), ""])
    accuracies = (f"{m['accuracy']:.1%}" for m in models.values())
    rows.append(["next-token accuracy", *accuracies, f"{100 * change['accuracy']:+.1f} points"])
    return rows


def evaluation_note(artifact: Artifact) -> str:
    """How many rows and tokens the figures rest on."""
    metrics = _metrics(artifact)
    return metrics["note"] or f"{metrics['documents']} held-out rows, {metrics['tokens']} tokens with loss"


def is_worse(artifact: Artifact) -> bool:
    """The held-out loss has risen: a learning rate too high, or rows too few."""
    change = _metrics(artifact)["difference"]
    return bool(change) and change["loss"] > 0


def _metrics(artifact: Artifact) -> dict[str, Any]:
    return json.loads((artifact.path / "metrics.json").read_text(encoding="utf-8"))


def _perplexity(value: float | None) -> str:
    return "too large" if value is None else f"{value:.4g}"


def _page(config: PipelineConfig, outcomes: Mapping[str, Outcome]) -> str:
    stages = [
        f"| {name} | {'cached' if outcome.cached else 'computed'} | {outcome.seconds:.1f} | "
        f"`{outcome.artifact.key[:12]}` | {reason_in_recipe_names(name, outcome.reason)} |"
        for name, outcome in outcomes.items()
    ]
    table = ["| stage | | seconds | artifact | why |", "| --- | --- | ---: | --- | --- |", *stages]
    saved = sum(o.artifact.record.producer.seconds for o in outcomes.values() if o.cached)
    parts = [
        f"# {config.name}",
        f"Model: `{outcomes['export'].artifact.path}`",
        "\n".join(table),
        f"The store saved {saved:.0f} s of computation.",
        (outcomes["evaluate"].artifact.path / "report.md").read_text(encoding="utf-8"),
    ]
    return "\n\n".join(parts)
