"""A run for which the store has everything, without Prefect, whose import and server would be all the work.

Only for the command line without a server: with one, such a run is shown there like any other.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.graph import StageName, nodes_until
from flows.preflight import check_model
from flows.recipe import PipelineConfig
from flows.reporting import StageReporter
from flows.result import PipelineResult, describe, read_result
from tasks import promote as promotion
from tasks.ledger import Run, begin
from tasks.promote import Verdict
from tasks.stage import Outcome, Stage, serve
from tasks.store import Artifact, ArtifactStore

_NAMES_A_SERVER = (
    "PREFECT_API_URL",
    "PREFECT_API_KEY",
    "PREFECT_PROFILE",
    "PREFECT_PROFILES_PATH",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE",
)


def may_have_server() -> bool:
    """Whether a Prefect server could be configured: Prefect knows, but takes 0.7 s to load its settings.

    So its sources are looked at here: environment, profiles, and the files that it reads in the working directory.
    """
    if any(os.environ.get(name) for name in _NAMES_A_SERVER):
        return True
    files = {
        Path("prefect.toml"): "",
        Path("pyproject.toml"): "tool.prefect",
        Path(".env"): "PREFECT_",
        prefect_home() / "profiles.toml": "PREFECT_",
    }
    return any(_has(path, word) for path, word in files.items())


def prefect_home() -> Path:
    """Where Prefect keeps its database, as far as the environment says."""
    return Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()


def _has(path: Path, word: str) -> bool:
    try:
        return word.lower() in path.read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return False


def run_cached(config: PipelineConfig, until: StageName | None) -> PipelineResult | None:
    """What the run would find; None, and no trace of it, where a stage would have to be computed or fetched.

    A store that cannot be written is served from all the same; then the run is not in its ledger.

    Raises:
        UserError: the model or the data cannot be used.
    """
    store = config.store.open()
    run = begin(store, config.name)
    result = None
    try:
        result = _find_all(config, store, until, run)
    except _Missing:
        pass
    finally:
        if run is not None:
            run.finish("completed") if result is not None else run.withdraw()
    return result


class _Missing(Exception):
    """Something is to be computed."""


def _find_all(config: PipelineConfig, store: ArtifactStore, until: StageName | None, run: Run | None) -> PipelineResult:
    outcomes: dict[str, Outcome] = {}
    for name, node in nodes_until(config, until).items():
        outcome = _find(store, node.build({role: outcomes[role].artifact for role in node.after}), run)
        if name == "download" and outcome.artifact.record.external is None:
            check_model(config, outcome.artifact.path)  # a local directory has been looked at already
        outcomes[name] = outcome
    verdict = None
    if config.promote.model is not None and until is None:
        verdict = _promote(config, store, {name: outcome.artifact for name, outcome in outcomes.items()}, run)
    for name, outcome in outcomes.items():
        _reporter(name).finished(describe(outcome))
    return read_result(config, outcomes, verdict)


def _promote(
    config: PipelineConfig, store: ArtifactStore, artifacts: Mapping[str, Artifact], run: Run | None
) -> Verdict:
    """Only the name can be given here: nothing is measured, nothing pushed."""
    from flows.report import evaluation_metrics

    if config.promote.push_to is not None:
        raise _Missing

    def measure(stage: Stage) -> Mapping[str, Any]:
        return evaluation_metrics(_find(store, stage, run).artifact)

    evaluation = nodes_until(config, None)["evaluate"].build(artifacts)
    metrics = evaluation_metrics(artifacts["evaluate"])
    verdict = promotion.promote(store, config.promote, evaluation, metrics, measure, config.name)
    _reporter("promote").finished(verdict.message)
    return verdict


def _find(store: ArtifactStore, stage: Stage, run: Run | None) -> Outcome:
    outcome = serve(store, stage, reporter=_reporter(stage.name), run=run)
    if outcome is None:
        raise _Missing
    return outcome


def _reporter(stage: str) -> StageReporter:
    return StageReporter(stage, logging.getLogger("mcaflow"))
