"""The demonstration as a hybrid, shortened, on the store of a finished training of its transformer."""

import pytest
import torch
from safetensors.torch import load_file

from flows.pipeline import pipeline
from flows.plan import make_plan
from flows.recipe import PipelineConfig
from flows.run_page import hybrid_summary
from mca_lib.evaluate import load_model
from tasks.store import ArtifactStore
from tests.flows.finished import Run

pytestmark = pytest.mark.usefixtures("forked_jobs")

PATTERN = "M*-*-M*-*-"


def changed(run: Run, **sections: dict) -> PipelineConfig:
    mamba = {"head_dim": 32, "state_size": 16, "chunk_size": 64}
    content = run.with_fields(
        checkpoint={"kind": "hybrid", "pattern": PATTERN, "fresh_layers": "zero_output", "mamba": mamba},
        training={"max_steps": 6, "learning_rate": 2e-3, "warmup_ratio": 0.0},
        parallel={"pipeline": 2, "pipeline_layout": "M*-*-|M*-*-"},
    ).model_dump()
    for name, fields in sections.items():
        content[name] |= fields
    return PipelineConfig.model_validate(content)


def changes(config: PipelineConfig) -> dict[str, list[str]]:
    """Stage that would be computed → fields that changed."""
    rows = make_plan(config, ArtifactStore(config.store.path))
    return {row.stage: [change.field for change in row.changed] for row in rows if row.verdict == "miss"}


def test_a_hybrid_run_starts_as_the_transformer_learns_and_is_a_model_for_transformers(run: Run):
    config = changed(run)
    outcomes = pipeline(config).outcomes
    assert list(outcomes) == ["download", "dataset", "translate", "train", "export", "evaluate"]
    assert {name for name, outcome in outcomes.items() if outcome.cached} == {"download", "dataset"}
    artifacts = {name: outcome.artifact for name, outcome in outcomes.items()}
    assert artifacts["translate"].stats["logits"]["max_difference"] < 1e-4
    assert hybrid_summary(config, outcomes) == (
        f"{PATTERN}: 2 of 10 layers are fresh, with a zero output projection, seed 0: 0, 5"
    )
    measured = artifacts["evaluate"].stats["models"]
    assert measured["trained"]["loss"] < measured["base"]["loss"]

    exported = artifacts["export"].path
    weights = load_file(exported / "model.safetensors")
    assert all(weights[f"model.layers.{layer}.mamba.out_proj.weight"].abs().max() > 0 for layer in (0, 5))
    model = load_model(exported, "float32")
    prompt = torch.arange(3, 20)[None]
    with_state, without = (
        model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=use_cache) for use_cache in (True, False)
    )
    assert with_state.equal(without)

    assert changes(config) == {}
    assert changes(changed(run, parallel={"pipeline": 1, "pipeline_layout": None})) == {}
    assert changes(changed(run, checkpoint={"seed": 1})) == {"translate": ["checkpoint.seed"]}
    assert changes(run.config) == {}, "the training of the transformer is what it was"
    again = pipeline(config).outcomes
    assert {name for name, outcome in again.items() if not outcome.cached} == set()
