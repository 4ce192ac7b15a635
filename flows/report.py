"""What a run leaves in the Prefect UI at its end: the evaluation and the stages, as artifacts of the flow run.

The figures are read from the evaluate artifact, so a run that found everything in the store reports the same.
"""

import json
from collections.abc import Mapping
from typing import Any

from flows.plan import reason_in_recipe_names
from flows.recipe import PipelineConfig
from mca_lib.evaluation.report import comparison, markdown, note, with_production
from mca_lib.models.config import McaModelConfig
from tasks.promote import Verdict
from tasks.stage import Outcome
from tasks.store import Artifact
from tasks.translate import fresh_summary


def publish_report(config: PipelineConfig, outcomes: Mapping[str, Outcome], verdict: Verdict | None = None) -> None:
    """Create the table and the page of this run; `verdict` says what became of its model."""
    from prefect.artifacts import (
        create_markdown_artifact,
        create_table_artifact,
    )  # the command line reads figures here too

    metrics = compared(outcomes["evaluate"].artifact, verdict)
    heading, *rows = comparison(metrics)
    if rows:
        table = [dict(zip(heading, row, strict=True)) for row in rows]
        create_table_artifact(table, key="evaluation", description=note(metrics))
    create_markdown_artifact(
        _page(config, outcomes, verdict), key="run", description="Stages, model and samples of this run"
    )


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


def _page(config: PipelineConfig, outcomes: Mapping[str, Outcome], verdict: Verdict | None) -> str:
    stages = [
        f"| {name} | {'cached' if outcome.cached else 'computed'} | {outcome.seconds:.1f} | "
        f"`{outcome.artifact.key[:12]}` | {reason_in_recipe_names(name, outcome.reason)} |"
        for name, outcome in outcomes.items()
    ]
    table = ["| stage | | seconds | artifact | why |", "| --- | --- | ---: | --- | --- |", *stages]
    saved = sum(o.artifact.record.producer.seconds for o in outcomes.values() if o.cached)
    summary = hybrid_summary(config, outcomes)
    evaluation = outcomes["evaluate"].artifact
    parts = [
        f"# {config.name}",
        *([f"Promotion: {verdict.message}"] if verdict else []),
        f"Model: `{outcomes['export'].artifact.path}`",
        *([f"Hybrid: `{summary}`"] if summary else []),
        "\n".join(table),
        f"The store saved {saved:.0f} s of computation.",
        markdown(compared(evaluation, verdict), _samples(evaluation)),
    ]
    return "\n\n".join(parts)


def _samples(evaluation: Artifact) -> list[dict[str, Any]]:
    lines = (evaluation.path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def hybrid_summary(config: PipelineConfig, outcomes: Mapping[str, Outcome]) -> str | None:
    """``M*-*-: 1 of 5 layers are fresh, …``; None for a transformer."""
    if "translate" not in outcomes:
        return None
    return fresh_summary(McaModelConfig.from_pretrained(outcomes["translate"].artifact.path), config.checkpoint)
