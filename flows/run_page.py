"""The page of a run: what the report of its evaluation says, and what belongs to this run alone.

That is the model in production at the time, what became of the promotion, how long stages took and what the store
spared. It lies beside the artifact, `<store>/.runs/evaluate-KEY/report.html`, and is written anew by each run; the
artifact's own `report.html` has what its content decides. Prefect's page has the same figures.
"""

import base64
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.plan import reason_in_recipe_names
from flows.recipe import PipelineConfig
from mca_lib.evaluation.page import Report, html_page
from mca_lib.evaluation.report import markdown
from mca_lib.models.config import McaModelConfig
from tasks.evaluate import read_samples
from tasks.evaluation_page import curve_chart, report_of
from tasks.process import redact
from tasks.promote import Verdict
from tasks.stage import Outcome
from tasks.store import Artifact, ArtifactStore
from tasks.translate import fresh_summary

_NAME = "report.html"
_log = logging.getLogger("mcaflow.report")

type Outcomes = Mapping[str, Outcome]


def report_path(store: ArtifactStore, evaluation: Artifact) -> Path | None:
    """Where the newest page about an evaluation lies; None where it was made by a release that wrote none."""
    candidates = (_run_page_path(store, evaluation), evaluation.path / _NAME)
    return next((path for path in candidates if path.is_file()), None)


def write_run_page(
    config: PipelineConfig, outcomes: Outcomes, verdict: Verdict | None, metrics: Mapping[str, Any]
) -> Path | None:
    """Write the HTML page of this run; None where the store cannot be written, which costs no more than a warning."""
    store = config.store.open()
    path = _run_page_path(store, outcomes["evaluate"].artifact)
    temporary = path.with_name(f".{_NAME}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = redact(html_page(run_report(store, config, outcomes, verdict, metrics)))
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        _log.warning("no page of this run: %s", error)
        return None
    return path


def run_report(
    store: ArtifactStore,
    config: PipelineConfig,
    outcomes: Outcomes,
    verdict: Verdict | None,
    metrics: Mapping[str, Any],
) -> Report:
    """What is on it. `metrics` has the model in production, where there is one."""
    roles = {"base": "download", "dataset": "dataset", "trained": "export"}
    inputs = {role: outcomes[stage].artifact for role, stage in roles.items()}
    report = report_of(store, inputs, metrics, read_samples(outcomes["evaluate"].artifact.path))
    facts = {
        "base model": f"{config.model.name_or_path} ({report.facts.get('model', 'unknown')})",
        "trained model": str(inputs["trained"].path),
        "hybrid": hybrid_summary(config, outcomes) or "",
        "promotion": verdict.message if verdict else "",
        "logs": _logs(store, outcomes),
        "store": f"{_spared(outcomes):.0f} s of computation spared",
    }
    return replace(
        report,
        title=config.name,
        facts={name: text for name, text in facts.items() if text},
        stages=[["stage", "", "seconds", "artifact", "why"], *_stage_rows(outcomes)],
        recipe=config.model_dump(mode="json"),
    )


def run_markdown(
    config: PipelineConfig,
    outcomes: Outcomes,
    verdict: Verdict | None,
    metrics: Mapping[str, Any],
    page: Path | None,
) -> str:
    """The same for Prefect, whose page shows pictures that stand in the text (tried with 3.9)."""
    rows = "\n".join(f"| {' | '.join(row)} |" for row in _stage_rows(outcomes, code=True))
    summary, evaluation = hybrid_summary(config, outcomes), outcomes["evaluate"].artifact
    train = outcomes["train"].artifact.record.stats
    parts = [
        f"# {config.name}",
        *([f"Promotion: {verdict.message}"] if verdict else []),
        f"Base model: {_code(config.model.name_or_path)}",
        f"Model: {_code(str(outcomes['export'].artifact.path))}",
        *([f"Hybrid: {_code(summary)}"] if summary else []),
        *([f"Report: {_code(str(page))}"] if page else []),
        f"Logs of the training: {_code(_logs(config.store.open(), outcomes))}",
        *(_picture(title, curve_chart(train, title)) for title in ("loss", "learning rate")),
        f"| stage | | seconds | artifact | why |\n| --- | --- | ---: | --- | --- |\n{rows}",
        f"The store spared {_spared(outcomes):.0f} s of computation.",
        markdown(metrics, read_samples(evaluation.path)),
    ]
    return redact("\n\n".join(part for part in parts if part))


def hybrid_summary(config: PipelineConfig, outcomes: Outcomes) -> str | None:
    """``M*-*-: 1 of 5 layers are fresh, …``; None for a transformer."""
    if "translate" not in outcomes:
        return None
    return fresh_summary(McaModelConfig.from_pretrained(outcomes["translate"].artifact.path), config.checkpoint)


def _run_page_path(store: ArtifactStore, evaluation: Artifact) -> Path:
    return store.root / ".runs" / f"{evaluation.stage}-{evaluation.key}" / _NAME


def _stage_rows(outcomes: Outcomes, *, code: bool = False) -> list[list[str]]:
    rows = []
    for name, outcome in outcomes.items():
        key = outcome.artifact.key[:12]
        how = "cached" if outcome.cached else "computed"
        reason = reason_in_recipe_names(name, outcome.reason)
        rows.append([name, how, f"{outcome.seconds:.1f}", _code(key) if code else key, reason])
    return rows


def _spared(outcomes: Outcomes) -> float:
    return sum(outcome.artifact.record.producer.seconds for outcome in outcomes.values() if outcome.cached)


def _logs(store: ArtifactStore, outcomes: Outcomes) -> str:
    return str(store.root / ".runs" / f"train-{outcomes['train'].artifact.key}")


def _code(text: str) -> str:
    """As Markdown's code, with a fence longer than any in the text."""
    fence = "`" * max([1, *(len(run) + 1 for run in re.findall("`+", text))])
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"


def _picture(title: str, svg: str) -> str:
    if not svg:
        return ""
    return f"![{title}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"
