"""What a run produced, whether Prefect ran it (`flows.pipeline`), or nobody, for all was there (`flows.cached`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flows.recipe import PipelineConfig
from flows.report import compared
from flows.run_page import hybrid_summary
from tasks.promote import Verdict
from tasks.stage import Outcome


@dataclass(frozen=True)
class PipelineResult:
    """The outcome of each stage, in pipeline order."""

    outcomes: dict[str, Outcome]
    verdict: Verdict | None = None
    """Whether the model was promoted, where the recipe asks for that."""
    metrics: Mapping[str, Any] | None = None
    """What was measured; None for a run that ends before."""
    hybrid: str | None = None
    """What became of a transformer's layers; None where it stayed one."""


def read_result(config: PipelineConfig, outcomes: dict[str, Outcome], verdict: Verdict | None = None) -> PipelineResult:
    """With what a person is told of the artifacts: read while the run is in the ledger, for then they are kept."""
    metrics = compared(outcomes["evaluate"].artifact, verdict) if "evaluate" in outcomes else None
    return PipelineResult(outcomes, verdict, metrics, hybrid_summary(config, outcomes))


def describe(outcome: Outcome) -> str:
    """``computed  3f2a…  in 12.3 s``: how a stage came by its artifact, on one line."""
    artifact = outcome.artifact
    if outcome.cached:
        return f"cached    {artifact.key[:12]}"
    return f"computed  {artifact.key[:12]}  in {outcome.seconds:.1f} s"
