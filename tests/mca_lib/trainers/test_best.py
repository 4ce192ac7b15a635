"""load_best_model_at_end: the result is the model of the best evaluation, whatever was interrupted."""

import shutil
import signal
from pathlib import Path

import pytest

from mca_lib.checkpoint.sealed import find_damage
from tests.mca_lib.trainers.test_resume import change_tokens, damage, same_weights, train_until
from tests.mca_lib.trainers.training import history, make_model, make_store, read_json, train
from tests.ranks import RankError

# A learning rate at which the held-out loss rises again before the end.
OPTIONS = {
    "max_steps": 12,
    "lr_scheduler_type": "constant",
    "learning_rate": 3e-2,
    "warmup_steps": 0,
    "save_steps": 3,
    "save_total_limit": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
}
BEST = {**OPTIONS, "load_best_model_at_end": True}


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("best")
    ranks(1, make_model, folder / "model", 0.1)
    make_store(folder / "store", rows=18)
    make_store(folder / "store", rows=5, split="eval", seed=9)
    return folder


@pytest.fixture(scope="module")
def whole(ranks, folder) -> list:
    """What a run that nobody interrupted has returned."""
    return ranks(2, train, f"{folder}/model", f"{folder}/store", f"{folder}/whole", BEST)


def test_the_result_is_the_model_of_the_best_evaluation(ranks, folder, whole):
    best = whole[0]["result"]["best"]
    assert 0 < best["step"] < BEST["max_steps"], "else this test shows nothing"
    assert best["loss"] < whole[0]["result"]["eval_loss"]
    shorter = {**OPTIONS, "max_steps": best["step"]}
    until_best = ranks(2, train, f"{folder}/model", f"{folder}/store", f"{folder}/shorter", shorter)
    assert until_best[0]["result"]["eval_loss"] == best["loss"]
    assert ranks(1, same_weights, folder / "whole" / "final", folder / "shorter" / "final") == [True]
    names = [{path.name for path in (folder / kind / "final").iterdir()} for kind in ("whole", "shorter")]
    assert names[0] == names[1]
    assert [find_damage(folder / kind / "final") for kind in ("whole", "shorter")] == [None, None]


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_a_resumed_run_ends_with_the_same_best_model(ranks, folder, whole, damaged):
    places, out = (f"{folder}/model", f"{folder}/store"), folder / f"killed {damaged}"
    best = whole[0]["result"]["best"]["step"]
    with pytest.raises(RankError, match="exit -9"):
        ranks(2, train_until, *places, str(out), BEST, 11, signal.SIGKILL)
    assert (out / f"best-{best}").is_dir()
    assert read_json(out / "checkpoint-9" / "trainer.json")["best"]["step"] == best
    if damaged:
        damage(max((out / f"best-{best}" / "model").glob("*.distcp"), key=lambda path: path.stat().st_size))
    else:  # of as many held-out rows and tokens
        change_tokens(Path(shutil.copytree(folder / "store", folder / "other")) / "eval")
        with pytest.raises(RankError, match=r"CheckpointError: .* was made with eval data="):
            ranks(2, train, places[0], f"{folder}/other", str(out), BEST)
    resumed = ranks(2, train, *places, str(out), BEST)
    assert len(list(out.glob("damaged-checkpoint-*"))) == (2 if damaged else 0), "checkpoints that name it go with it"
    assert resumed[0]["result"]["best"] == whole[0]["result"]["best"]
    assert (history(resumed) == history(whole)).all()
    assert ranks(1, same_weights, out / "final", folder / "whole" / "final") == [True]


def test_a_checkpoint_that_has_not_looked_for_the_best_is_refused(ranks, folder, whole):
    out = folder / "refused"
    shutil.copytree(folder / "shorter", out)
    options = {**BEST, "max_steps": whole[0]["result"]["best"]["step"]}
    with pytest.raises(RankError, match="was made with load_best_model_at_end=None, this run has True"):
        ranks(2, train, f"{folder}/model", f"{folder}/store", str(out), options)
