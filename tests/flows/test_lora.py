"""The demonstration with LoRA, shortened, on the store of a finished full training."""

import json
from pathlib import Path

import pytest

from flows.pipeline import pipeline
from flows.plan import make_plan
from flows.recipe import PipelineConfig
from tasks.store import ArtifactStore
from tests.flows.finished import Run

pytestmark = pytest.mark.usefixtures("forked_jobs")

ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}


def changed(run: Run, **sections: dict) -> PipelineConfig:
    content = run.with_fields(
        training={"finetuning_type": "lora", "learning_rate": 1e-2, "max_steps": 6, "warmup_ratio": 0.0},
        lora={"r": 4, "dropout": 0.1},
        parallel={"tensor": 2, "sequence_parallel": True},
    ).model_dump()
    for name, fields in sections.items():
        content[name] |= fields
    return PipelineConfig.model_validate(content)


def changes(config: PipelineConfig) -> dict[str, list[str]]:
    """Stage that would be computed → fields that changed."""
    rows = make_plan(config, ArtifactStore(config.store.path))
    return {row.stage: [change.field for change in row.changed] for row in rows if row.verdict == "miss"}


def logits(base: Path, adapter: Path | None = None):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits


def test_a_lora_run_shares_the_model_learns_and_gives_an_adapter_and_a_merged_model(run: Run):
    config = changed(run)
    outcomes = pipeline(config).outcomes
    # As of every changed training: what comes before it is taken from the store.
    assert {name for name, outcome in outcomes.items() if outcome.cached} == {"download", "dataset", "convert"}
    artifacts = {name: outcome.artifact for name, outcome in outcomes.items()}
    trained, exported = artifacts["train"], artifacts["export"].path
    assert trained.stats["final_loss"] < trained.stats["train_loss"]
    assert {p.name for p in trained.path.iterdir()} >= ADAPTER
    assert not (trained.path / "model").exists(), "the frozen model is not stored again"
    assert {p.name for p in (exported / "adapter").iterdir()} == ADAPTER
    merged = logits(exported)
    assert (merged - logits(config.model.name_or_path, exported / "adapter")).abs().max() < 1e-5
    assert (merged - logits(config.model.name_or_path)).abs().max() > 1e-3
    measured = artifacts["evaluate"].stats
    assert measured["models"]["trained"]["loss"] < measured["models"]["base"]["loss"]

    assert changes(config) == {}
    assert changes(changed(run, lora={"r": 8})) == {"train": ["lora.r"]}
    assert changes(run.config) == {}, "the full training is what it was"
    alone = changed(run, export={"lora": "adapter"})
    assert changes(alone) == {"export": ["export.lora"]}
    again = pipeline(alone).outcomes
    adapter = again["export"].artifact.path
    assert {p.name for p in adapter.iterdir()} >= {*ADAPTER, "tokenizer.json"}
    assert not list(adapter.glob("model*"))
    assert again["evaluate"].artifact.stats["models"]["trained"]["loss"] == pytest.approx(
        measured["models"]["trained"]["loss"], rel=1e-5
    )
    assert json.loads((adapter / "adapter_config.json").read_text())["lora_dropout"] == 0.1
