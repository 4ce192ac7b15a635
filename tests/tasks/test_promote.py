"""A promotion compares with the model that has the name, whatever other runs do meanwhile."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mca_lib.errors import ConfigError, ModelError
from tasks.aliases import Aliases
from tasks.evaluate import EvalConfig, EvaluateStage
from tasks.promote import PromoteConfig, Verdict, check_gate, promote, promotion_problems
from tasks.stage import ensure
from tasks.store import ArtifactStore
from tests.tasks.toys import Exported, Letter

BETTER = PromoteConfig(model="chat", gate=["heldout_loss < production"])


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def metrics(loss: float) -> dict[str, Any]:
    model = {"loss": loss, "perplexity": None, "accuracy": 0.5}
    return {"documents": 2, "models": {"base": {**model, "loss": 9.0}, "trained": model}}


def measure(stage: EvaluateStage) -> dict[str, Any]:
    """A model's loss is what its text says."""
    return metrics(float((stage.trained.path / "config.json").read_text().partition("@")[0]))


def run(store: ArtifactStore, text: str, config: PromoteConfig = BETTER, measure: Any = measure) -> Verdict:
    letter = ensure(store, Letter("a")).artifact
    stage = EvaluateStage(letter, ensure(store, Exported(text)).artifact, letter, EvalConfig())
    return promote(store, config, stage, metrics(float(text.partition("@")[0])), measure, text)


def history(store: ArtifactStore) -> list[str]:
    return [promotion.run for promotion in Aliases(store).history("chat")]


def test_a_worse_model_is_not_promoted_and_the_reason_is_told(store: ArtifactStore) -> None:
    assert run(store, "2").decision.promoted is not None
    assert run(store, "2").decision.promoted is not None, "the holder keeps the name"
    refused = run(store, "3")
    assert refused.message == (
        "chat/production not promoted: heldout_loss < production: heldout_loss is 3, and it must be < 2"
    )
    assert refused.production == metrics(2)
    assert history(store) == ["2"]
    perplexity = PromoteConfig(model="chat", gate=["perplexity < 1000"])
    assert run(store, "1", perplexity).decision.promoted is None, "too large to be a number"


def test_a_holder_that_changed_while_it_was_measured_is_not_what_decides(store: ArtifactStore) -> None:
    run(store, "5")

    def overtaken(stage: EvaluateStage) -> dict[str, Any]:
        if history(store) == ["5"]:
            run(store, "1")
        return measure(stage)

    refused = run(store, "3", measure=overtaken)
    assert "it must be < 1" in refused.message
    assert history(store) == ["5", "1"]


def test_of_many_runs_at_once_each_winner_beats_the_one_before(store: ArtifactStore) -> None:
    losses = ["7", "3", "5", "1", "6", "2", "4"]
    with ThreadPoolExecutor(len(losses)) as pool:
        verdicts = list(pool.map(lambda text: run(store, text), losses))
    winners = [float(name) for name in history(store)]
    assert winners == sorted(winners, reverse=True)
    assert winners[-1] == 1
    assert len(winners) == sum(verdict.decision.promoted is not None for verdict in verdicts)


def test_what_was_rolled_back_is_promoted_by_hand_alone(store: ArtifactStore) -> None:
    run(store, "2")
    run(store, "1")
    Aliases(store).rollback("chat")
    assert "it was rolled back" in run(store, "1").message
    Aliases(store).promote("chat", ensure(store, Exported("1")).artifact)
    assert run(store, "1").decision.promoted is not None


def test_a_holder_that_cannot_be_measured_refuses_what_is_compared_with_it(store: ArtifactStore) -> None:
    run(store, "5@one tokenizer")
    assert "has another tokenizer" in run(store, "1@another").message

    def unusable(stage: EvaluateStage) -> dict[str, Any]:
        raise ModelError("token id 9 is beyond the vocabulary")

    assert "cannot be evaluated on these rows: token id 9" in run(store, "1@one tokenizer", measure=unusable).message
    holder = Aliases(store).current("chat")
    shutil.rmtree(store.location(holder.stage, holder.key))
    assert "is no longer whole" in run(store, "1@one tokenizer").message
    assert run(store, "1@another", PromoteConfig(model="chat", gate=["heldout_loss < 2"])).decision.promoted


def test_only_whole_exported_models_are_promoted(store: ArtifactStore) -> None:
    letter = ensure(store, Letter("a")).artifact
    with pytest.raises(ConfigError, match="is no exported model"):
        promote(store, BETTER, EvaluateStage(letter, letter, letter, EvalConfig()), metrics(1), measure, "")
    exported = ensure(store, Exported("1")).artifact
    shutil.rmtree(exported.path)
    with pytest.raises(ConfigError, match="is damaged or no longer in the store"):
        promote(store, BETTER, EvaluateStage(letter, exported, letter, EvalConfig()), metrics(1), measure, "")


@pytest.mark.parametrize(
    ("gate", "facts", "said"),
    [
        (["loss < 1"], {}, "loss is not measured; measures are heldout_loss"),
        (["reward_margin > 0"], {}, "reward_margin is not measured"),
        (["reward_margin > base"], {"pairs": True}, "use a number"),
        (["heldout_loss"], {}, "is no condition"),
        (["heldout_loss < 1"], {"held_out": False}, "no rows are held out"),
    ],
)
def test_a_gate_that_could_not_be_decided_is_found_in_the_recipe(gate: list[str], facts: dict, said: str) -> None:
    config = PromoteConfig(model="chat", gate=gate)
    (problem,) = promotion_problems(config, **{"pairs": False, "held_out": True} | facts)
    assert problem.startswith("promote.gate: ")
    assert said in problem


def test_a_gate_knows_what_tasks_measure() -> None:
    config = PromoteConfig(model="chat", gate=["arc_easy.acc >= production - 0.01"])
    assert not list(promotion_problems(config, pairs=False, held_out=False, tasks=True)), "no held-out rows are needed"
    (problem,) = promotion_problems(config, pairs=False, held_out=True)
    assert "arc_easy.acc is not measured" in problem
    check_gate(config, {"arc_easy.acc"})
    with pytest.raises(ConfigError, match=r"no task measures arc_easy\.acc; measured: arc_easy\.acc_norm$"):
        check_gate(config, {"arc_easy.acc_norm"})


def test_a_task_decides_without_held_out_rows(store: ArtifactStore) -> None:
    config = PromoteConfig(model="chat", gate=["arc.acc > base", "arc.acc > production"])

    def score(text: str) -> dict[str, Any]:
        figures = {"base": {"value": 0.25}, "trained": {"value": float(text)}}
        return {"documents": 0, "models": {}, "tasks": {"arc.acc": figures}}

    def promoted(text: str) -> Verdict:
        letter, exported = ensure(store, Letter("a")).artifact, ensure(store, Exported(text)).artifact
        stage = EvaluateStage(letter, exported, letter, EvalConfig())
        holder = lambda stage: score((stage.trained.path / "config.json").read_text())  # noqa: E731
        return promote(store, config, stage, score(text), holder, text)

    assert promoted("0.5").decision.promoted is not None
    assert "arc.acc > production: arc.acc is 0.4, and it must be > 0.5" in promoted("0.4").message
    assert "arc.acc > base" in promoted("0.2").message
