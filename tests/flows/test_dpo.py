"""The demonstration of preference optimization, shortened, on the store of a finished supervised run."""

import json
import math

import pytest

from flows.pipeline import pipeline
from flows.plan import make_plan
from flows.recipe import PipelineConfig
from tasks.store import ArtifactStore
from tests.flows.finished import Run

pytestmark = pytest.mark.usefixtures("forked_jobs")

CHANGES = {
    "dataset": {"ranking": True, "packing": True, "eval_fraction": 0.05},
    "training": {"stage": "dpo", "max_steps": 6, "learning_rate": 2e-3, "warmup_ratio": 0.0, "global_batch_size": 4},
}


def changed(run: Run, **dpo: object) -> PipelineConfig:
    content = run.config.model_dump()
    for section, fields in CHANGES.items():
        content[section] |= fields
    content["dataset"]["files"] = [str(run.folder / "assets" / "pairs.json")]
    content["dpo"] |= dpo
    content["launcher"]["nproc_per_node"] = 1
    return PipelineConfig.model_validate(content)


def test_a_preference_run_shares_the_model_learns_and_is_cached_itself(run: Run):
    config = changed(run)
    outcomes = pipeline(config).outcomes
    cached = {name: outcome.cached for name, outcome in outcomes.items()}
    assert cached == {
        "download": True,
        "dataset": False,
        "convert": True,
        "train": False,
        "export": False,
        "evaluate": False,
    }
    statistics = outcomes["train"].artifact.stats
    assert statistics["train_loss"] == pytest.approx(math.log(2), abs=0.1)
    preference = json.loads((outcomes["evaluate"].artifact.path / "metrics.json").read_text())["preference"]
    assert preference["pairs"] == 8
    assert preference["reward_margin"] != 0
    assert "reward accuracy" in (outcomes["evaluate"].artifact.path / "report.md").read_text()

    store = ArtifactStore(config.store.path)
    assert {row.verdict for row in make_plan(config, store)} == {"hit"}
    (train,) = (row for row in make_plan(changed(run, pref_beta=0.3), store) if row.stage == "train")
    assert (train.verdict, [change.field for change in train.changed]) == ("miss", ["dpo.pref_beta"])
