"""What a run leaves in the Prefect UI at its end: the evaluation and the stages, as artifacts of the flow run.

The figures are read from the evaluate artifact, so a run that found everything in the store reports the same.
"""

import json
from collections.abc import Mapping
from typing import Any

from flows.recipe import PipelineConfig
from flows.run_page import run_markdown, write_run_page
from mca_lib.evaluation.report import comparison, note, with_production
from tasks.promote import Verdict
from tasks.stage import Outcome
from tasks.store import Artifact


def publish_report(config: PipelineConfig, outcomes: Mapping[str, Outcome], verdict: Verdict | None = None) -> None:
    """Create the table and the pages of this run; `verdict` says what became of its model."""
    # Not above: the command line reads figures here too, without Prefect.
    from prefect.artifacts import create_markdown_artifact, create_table_artifact

    metrics = compared(outcomes["evaluate"].artifact, verdict)
    heading, *rows = comparison(metrics)
    if rows:
        table = [dict(zip(heading, row, strict=True)) for row in rows]
        create_table_artifact(table, key="evaluation", description=note(metrics))
    page = write_run_page(config, outcomes, verdict, metrics)
    text = run_markdown(config, outcomes, verdict, metrics, page)
    create_markdown_artifact(text, key="run", description="Curves, stages, model and samples of this run")


def evaluation_metrics(artifact: Artifact) -> dict[str, Any]:
    """What the evaluate stage measured; see `mca_lib/evaluate.py`."""
    return json.loads((artifact.path / "metrics.json").read_text(encoding="utf-8"))


def compared(evaluation: Artifact, verdict: Verdict | None) -> dict[str, Any]:
    """What was measured, with the model that had the name where there was one."""
    metrics = evaluation_metrics(evaluation)
    production = verdict.production if verdict else None
    return metrics if production is None else with_production(metrics, production)


def is_worse(metrics: Mapping[str, Any]) -> bool:
    """The held-out loss has risen, or more pairs are ranked wrong than right: a rate too high, or rows too few."""
    if "preference" in metrics:
        # The chosen answers' loss may well rise with the rejected ones' rising more.
        return metrics["preference"]["reward_accuracy"] < 0.5
    change = metrics["difference"]
    return bool(change) and change["loss"] > 0
