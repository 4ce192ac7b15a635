"""A flow that measures what a recipe has trained, and computes nothing that comes before."""

from prefect import flow
from prefect.runtime import flow_run

from flows import hooks
from flows.pipeline import PipelineResult, pipeline
from flows.plan import make_plan
from flows.recipe import PipelineConfig
from mca_lib.errors import ConfigError


def _run_name() -> str:
    config = flow_run.parameters.get("config")
    name = config["name"] if isinstance(config, dict) else config.name
    return f"{name} · evaluation {flow_run.scheduled_start_time:%Y-%m-%d %H:%M}"


@flow(name="mcaflow-evaluate", flow_run_name=_run_name, persist_result=False, log_prints=True, **hooks.HOOKS)
def evaluate_only(config: PipelineConfig, again: bool = False) -> PipelineResult:
    """Evaluate the model that the recipe has trained.

    Args:
        config: The recipe. Fields of `eval` may differ from those that the model was trained with.
        again: Measure anew although the store has the evaluation.
    """
    require_trained(config)
    return pipeline.fn(config, refresh=["evaluate"] if again else None, until="evaluate")


def require_trained(config: PipelineConfig) -> None:
    """Raise ConfigError when something before the evaluation would have to be computed."""
    rows = make_plan(config, config.store.open())
    missing = [row for row in rows if row.verdict != "hit" and row.stage != "evaluate"]
    if missing:
        raise ConfigError(
            f"nothing to evaluate: stage {missing[0].stage} is not in the store {config.store.path} "
            f"({missing[0].detail}); run the deployment mcaflow/{config.name} first"
        )
