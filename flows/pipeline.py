"""The Prefect flow: stages of ``flows.graph`` as tasks, each served from the artifact store where it can be.

Prefect keeps no results of its own: a task returns the state ``Cached`` when its artifact was in the store, and
``Completed`` when it computed it. So a retry from the UI, a scheduled run and a run on another machine all find the
same artifacts. Stages that do not wait for each other run at the same time, in threads; training runs in the main
thread, which is the one that gets the signals.
"""

from collections.abc import Collection, Mapping
from typing import Any

from prefect import Task, flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run
from prefect.states import Completed, State

from flows import hooks
from flows.gpu import occupying
from flows.graph import Artifacts, StageName, check_refresh, nodes_of, nodes_until, waves
from flows.preflight import check_model, check_pending, check_recipe, check_space
from flows.recipe import PipelineConfig
from flows.report import evaluation_metrics, publish_report
from flows.reporting import StageReporter
from flows.result import PipelineResult, describe, read_result
from flows.stage_states import EXPECTED, failed, name_task
from tasks import promote as promotion
from tasks.cancel import scope
from tasks.ledger import Run, recorded
from tasks.process import terminate_all
from tasks.promote import Verdict
from tasks.push import push
from tasks.stage import Outcome, Stage, at_once, ensure


def _run_name() -> str:
    config = flow_run.parameters.get("config")
    name = config["name"] if isinstance(config, dict) else getattr(config, "name", None)
    return f"{name or 'mcaflow'} · {flow_run.scheduled_start_time:%Y-%m-%d %H:%M}"


@flow(name="mcaflow", flow_run_name=_run_name, persist_result=False, log_prints=True, **hooks.HOOKS)
def pipeline(
    config: PipelineConfig, refresh: list[StageName] | None = None, until: StageName | None = None
) -> PipelineResult | State:
    """Download, tokenize, convert or translate, train, export, evaluate; what the store has is not computed again.

    The result is promoted last, where the recipe asks for it.

    Args:
        config: The recipe.
        refresh: Stages to compute anew although the store has them. A retry of the run does so once: what an earlier
            attempt has computed anew is taken from the store.
        until: Stop after this stage, promote nothing, and leave out what the stage does not need.
    """
    try:
        return _run(config, refresh or (), until)
    except BaseException as error:
        # Cancelled, interrupted or failed: stages in threads cannot see a signal, so their children are ended here.
        terminate_all()
        if isinstance(error, EXPECTED):
            return failed(error)
        raise


def _run(config: PipelineConfig, refresh: Collection[StageName], until: StageName | None) -> PipelineResult:
    nodes = nodes_until(config, until)
    again = check_refresh(nodes, refresh)
    check_recipe(config)
    store = config.store.open()
    check_pending(config, again, until, store)
    outcomes: dict[StageName, Outcome] = {}
    with recorded(store, config.name, flow_run.id) as run:
        for wave in waves(nodes):
            jobs = {
                name: (config, {role: outcomes[role].artifact for role in nodes[name].after}, name in again, run)
                for name in wave
            }
            outcomes |= _side_by_side(jobs) if len(jobs) > 1 else _one(jobs)
            if "download" in wave:
                check_model(config, outcomes["download"].artifact.path)
                check_space(config, outcomes["download"].artifact.path, again, until, store)
        verdict = None
        if config.promote.model is not None and until is None:
            artifacts = {name: outcome.artifact for name, outcome in outcomes.items()}
            try:
                verdict = promote(config, artifacts, run, return_state=True).result()
            except Exception:
                publish_report(config, outcomes)  # what was measured stands
                raise
        if "evaluate" in outcomes:
            publish_report(config, outcomes, verdict)
        return read_result(config, outcomes, verdict)


type _Job = tuple[PipelineConfig, Artifacts, bool, Run | None]
"""Arguments of a task: the recipe, the artifacts it waits for, whether to compute it anew, the run's ledger entry."""


def _one(jobs: Mapping[StageName, _Job]) -> dict[StageName, Outcome]:
    """In the main thread, which gets the signals."""
    return {name: _TASKS[name](*job, return_state=True).result() for name, job in jobs.items()}


def _side_by_side(jobs: Mapping[StageName, _Job]) -> dict[StageName, Outcome]:
    """In threads. The first failure is raised when all have ended."""
    futures = {name: _TASKS[name].submit(*job) for name, job in jobs.items()}
    for future in futures.values():
        future.wait()
    return {name: future.state.result() for name, future in futures.items()}


def _ensure(
    stage: StageName, config: PipelineConfig, inputs: Artifacts, refresh: bool, run: Run | None
) -> State[Outcome]:
    reporter = StageReporter(stage, get_run_logger())
    store, built = config.store.open(), nodes_of(config)[stage].build(inputs)
    occupy = occupying(config.launcher, reporter) if stage == "train" else at_once
    try:
        outcome = ensure(store, built, refresh=refresh, reporter=reporter, run=run, occupy=occupy)
    except BaseException as error:
        reporter.failed(error)
        if isinstance(error, EXPECTED):
            return failed(error, stage)
        raise
    name_task(stage, outcome.artifact)
    note = describe(outcome)
    reporter.finished(note)
    return Completed(name="Cached" if outcome.cached else "Completed", message=" ".join(note.split()), data=outcome)


@task(name="promote", task_run_name="promote", cache_policy=NO_CACHE, persist_result=False)
def promote(config: PipelineConfig, artifacts: Artifacts, run: Run | None) -> State[Verdict]:
    """Give the model its name, if the gate lets it."""
    reporter, store = StageReporter("promote", get_run_logger()), config.store.open()

    def measure(stage: Stage) -> Mapping[str, Any]:
        return evaluation_metrics(ensure(store, stage, reporter=reporter, run=run).artifact)

    evaluation = nodes_of(config)["evaluate"].build(artifacts)
    metrics = evaluation_metrics(artifacts["evaluate"])
    try:
        verdict = promotion.promote(store, config.promote, evaluation, metrics, measure, config.name)
        if verdict.decision.promoted and config.promote.push_to:
            trained, target = evaluation.trained, config.promote.push_to
            with scope() as running:
                pushed = push(store, verdict.model, verdict.alias, trained, target, running.check)
            reporter.info(f"pushed to {target}" if pushed else f"not pushed: {verdict.model} has a newer holder")
    except BaseException as error:
        reporter.failed(error)
        if isinstance(error, EXPECTED):
            return failed(error, "promote")
        raise
    reporter.finished(verdict.message)
    return Completed(
        name="Promoted" if verdict.decision.promoted else "NotPromoted", message=verdict.message, data=verdict
    )


def _stage_task(name: StageName, description: str) -> Task:
    def run_stage(config: PipelineConfig, inputs: Artifacts, refresh: bool, run: Run | None) -> State[Outcome]:
        return _ensure(name, config, inputs, refresh, run)

    run_stage.__name__ = run_stage.__qualname__ = name  # by which Prefect tells tasks apart
    run_stage.__doc__ = description
    return task(name=name, task_run_name=name, cache_policy=NO_CACHE, persist_result=False)(run_stage)


_TASKS: dict[StageName, Task] = {
    name: _stage_task(name, description)
    for name, description in {
        "download": "Pin the model to exact bytes.",
        "dataset": "Validate, tokenize, shuffle and pack the data.",
        "convert": "Convert the weights to Megatron-Core and compare the logits.",
        "translate": "Make a hybrid of the transformer: its weights, and fresh Mamba layers.",
        "train": "Train on all ranks with torchrun.",
        "export": "Write the trained model as a Hugging Face directory.",
        "evaluate": "Compare the trained model with the base model on held-out rows.",
    }.items()
}
