"""The Prefect flow: stages of ``flows.graph`` as tasks, each served from the artifact store where it can be.

Prefect keeps no results of its own: a task returns the state ``Cached`` when its artifact was in the store, and
``Completed`` when it computed it. So a retry from the UI, a scheduled run and a run on another machine all find the
same artifacts. Stages that do not wait for each other run at the same time, in threads; training runs in the main
thread, which is the one that gets the signals.
"""

from dataclasses import dataclass

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run
from prefect.states import Completed, State

from flows import hooks
from flows.gpu import occupying
from flows.graph import Artifacts, StageName, nodes_of, start_of
from flows.preflight import check_model, check_pending, check_recipe, check_space
from flows.recipe import PipelineConfig
from flows.report import publish_report
from flows.reporting import StageReporter
from tasks.process import terminate_all
from tasks.stage import Outcome, at_once, ensure
from tasks.store import ArtifactStore


@dataclass(frozen=True)
class PipelineResult:
    """What a run produced: the outcome of each stage, in pipeline order."""

    outcomes: dict[str, Outcome]


def _run_name() -> str:
    config = flow_run.parameters.get("config")
    name = config["name"] if isinstance(config, dict) else getattr(config, "name", None)
    return f"{name or 'mcaflow'} · {flow_run.scheduled_start_time:%Y-%m-%d %H:%M}"


@flow(name="mcaflow", flow_run_name=_run_name, persist_result=False, **hooks.HOOKS)
def pipeline(config: PipelineConfig, refresh: list[StageName] | None = None) -> PipelineResult:
    """Download, tokenize, convert or translate, train, export, evaluate; what the store has is not computed again.

    Args:
        config: The recipe.
        refresh: Stages to compute anew although the store has them.
    """
    again = frozenset(refresh or ())
    try:
        return _run(config, again)
    except BaseException:
        # Cancelled, interrupted or failed: stages in threads cannot see a signal, so their children are ended here.
        terminate_all()
        raise


def _run(config: PipelineConfig, again: frozenset[str]) -> PipelineResult:
    check_recipe(config)
    check_pending(config, again)
    nodes, start = nodes_of(config), start_of(config)
    outcomes: dict[str, Outcome] = {}

    def done(stage: StageName) -> Artifacts:
        return {name: outcomes[name].artifact for name in nodes[stage].after}

    outcomes["download"] = _outcome(download(config, {}, "download" in again, return_state=True))
    model_dir = outcomes["download"].artifact.path
    check_model(config, model_dir)
    check_space(config, model_dir)
    side_by_side = {
        "dataset": dataset.submit(config, done("dataset"), "dataset" in again),
        start: _STARTS[start].submit(config, done(start), start in again),
    }
    for future in side_by_side.values():
        future.wait()
    outcomes |= {stage: _outcome(future.state) for stage, future in side_by_side.items()}
    outcomes["train"] = _outcome(train(config, done("train"), "train" in again, return_state=True))
    outcomes["export"] = _outcome(export(config, done("export"), "export" in again, return_state=True))
    outcomes["evaluate"] = _outcome(evaluate(config, done("evaluate"), "evaluate" in again, return_state=True))
    publish_report(config, outcomes)
    return PipelineResult(outcomes)


def _outcome(state: State[Outcome]) -> Outcome:
    """The outcome in a task's final state; raises what the task raised."""
    return state.result()


def _ensure(stage: StageName, config: PipelineConfig, inputs: Artifacts, refresh: bool) -> State[Outcome]:
    reporter = StageReporter(stage, get_run_logger())
    store = ArtifactStore(config.store.path)
    occupy = occupying(config.launcher, reporter) if stage == "train" else at_once
    try:
        outcome = ensure(
            store, nodes_of(config)[stage].build(inputs), refresh=refresh, reporter=reporter, occupy=occupy
        )
    except BaseException as error:
        reporter.failed(error)
        raise
    note = describe(outcome)
    reporter.finished(note)
    return Completed(name="Cached" if outcome.cached else "Completed", message=note, data=outcome)


def describe(outcome: Outcome) -> str:
    """``computed  3f2a…  in 12.3 s``: how a stage came by its artifact, on one line."""
    artifact = outcome.artifact
    if outcome.cached:
        return f"cached    {artifact.key[:12]}"
    return f"computed  {artifact.key[:12]}  in {outcome.seconds:.1f} s"


def _task(name: StageName):
    return task(name=name, task_run_name=name, cache_policy=NO_CACHE, persist_result=False)


@_task("download")
def download(config: PipelineConfig, inputs: Artifacts, refresh: bool) -> State[Outcome]:
    """Pin the model to exact bytes."""
    return _ensure("download", config, inputs, refresh)


@_task("dataset")
def dataset(config: PipelineConfig, inputs: Artifacts, refresh: bool) -> State[Outcome]:
    """Validate, tokenize, shuffle and pack the data."""
    return _ensure("dataset", config, inputs, refresh)


@_task("convert")
def convert(config: PipelineConfig, inputs: Artifacts, refresh: bool) -> State[Outcome]:
    """Convert the weights to Megatron-Core and compare the logits."""
    return _ensure("convert", config, inputs, refresh)


@_task("translate")
def translate(config: PipelineConfig, inputs: Artifacts, refresh: bool) -> State[Outcome]:
    """Make a hybrid of the transformer: its weights, and fresh Mamba layers."""
    return _ensure("translate", config, inputs, refresh)


_STARTS = {"convert": convert, "translate": translate}


@_task("train")
def train(config: PipelineConfig, inputs: Artifacts, refresh: bool) -> State[Outcome]:
    """Train on all ranks with torchrun."""
    return _ensure("train", config, inputs, refresh)


@_task("export")
def export(config: PipelineConfig, inputs: Artifacts, refresh: bool) -> State[Outcome]:
    """Write the trained model as a Hugging Face directory."""
    return _ensure("export", config, inputs, refresh)


@_task("evaluate")
def evaluate(config: PipelineConfig, inputs: Artifacts, refresh: bool) -> State[Outcome]:
    """Compare the trained model with the base model on held-out rows."""
    return _ensure("evaluate", config, inputs, refresh)
