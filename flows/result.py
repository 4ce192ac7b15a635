"""What a run produced, whether Prefect ran it (`flows.pipeline`), or nobody, for all was there (`flows.cached`)."""

from dataclasses import dataclass

from tasks.promote import Verdict
from tasks.stage import Outcome


@dataclass(frozen=True)
class PipelineResult:
    """The outcome of each stage, in pipeline order."""

    outcomes: dict[str, Outcome]
    verdict: Verdict | None = None
    """Whether the model was promoted, where the recipe asks for that."""


def describe(outcome: Outcome) -> str:
    """``computed  3f2a…  in 12.3 s``: how a stage came by its artifact, on one line."""
    artifact = outcome.artifact
    if outcome.cached:
        return f"cached    {artifact.key[:12]}"
    return f"computed  {artifact.key[:12]}  in {outcome.seconds:.1f} s"
