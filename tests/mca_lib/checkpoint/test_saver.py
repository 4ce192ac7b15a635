"""Checkpoints that are written while training goes on are those of their step, and appear whole or not at all."""

import filecmp
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mca_lib.checkpoint.digest import weights_digest
from mca_lib.checkpoint.sealed import find_damage
from tests.mca_lib.trainers.test_resume import same_weights
from tests.mca_lib.trainers.training import history, make_model, make_store, train
from tests.ranks import RankError

OPTIONS = {"max_steps": 7, "save_steps": 2}


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saver")
    ranks(1, make_model, folder / "model", 0.1)
    make_store(folder / "store", rows=18)
    return folder


@pytest.fixture
def places(folder) -> tuple[str, str]:
    return f"{folder}/model", f"{folder}/store"


def write_late() -> None:
    """From here on a checkpoint is written when somebody waits for it: two steps late, at the next one."""
    import threading

    from mca_lib.checkpoint import saver

    write, finish, awaited = saver._write, saver.CheckpointSaver.finish, threading.Event()

    def late(*args):
        awaited.clear()
        assert awaited.wait(60)
        return write(*args)

    def waiting(self):
        while self._save and not self._save.work.done():
            awaited.set()
        finish(self)

    saver._write, saver.CheckpointSaver.finish = late, waiting


def train_writing_late(model: str, store: str, out: str, options: dict[str, Any], terminated: int = 0) -> Any:
    """With SIGTERM to rank 0, twice, in the step `terminated`, if that is not 0."""
    from mca_lib.trainers.engine import Engine

    original, done = Engine.train_step, []

    def counting(self, batches):
        done.append(1)
        if len(done) == terminated and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batches)

    Engine.train_step = counting
    write_late()
    return train(model, store, out, {**options, "async_save": True})


@pytest.mark.parametrize(
    "extra",
    [{"bf16": True}, {"use_distributed_optimizer": False}],
    ids=["DP2 bf16", "DP2 without the distributed optimizer"],
)
def test_what_is_written_late_is_of_its_step(ranks, folder, places, extra):
    options, names = {**OPTIONS, **extra}, ("checkpoint-2", "checkpoint-4", "checkpoint-6")
    out = {kind: folder / f"{kind} {'-'.join(extra)}" for kind in ("late", "at once")}
    late = ranks(2, train_writing_late, *places, str(out["late"]), options)
    at_once = ranks(2, train, *places, str(out["at once"]), options)
    assert (history(late) == history(at_once)).all()
    for name in names:
        assert find_damage(out["late"] / name) is None
        states = [weights_digest(out[kind] / name / "state") for kind in out]
        assert states[0] == states[1], f"tensors of {name}"
        same, *others = filecmp.cmpfiles(out["late"] / name, out["at once"] / name, ["rng_0.pt", "rng_1.pt"], False)
        assert len(same) == 2, others


def test_sigterm_twice_while_a_checkpoint_is_written(ranks, folder, places):
    out = folder / "terminated"
    with pytest.raises(RankError) as failure:
        ranks(2, train_writing_late, *places, str(out), OPTIONS, 5)
    assert str(failure.value).count("SystemExit: 143") == 2, "both ranks leave, although one was told"
    found = sorted(out.glob("checkpoint-*"))
    assert [path.name for path in found] == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    assert not any(map(find_damage, found))
    assert not list(out.glob(".staging-*"))
    ranks(2, train, *places, str(out), OPTIONS)
    ranks(2, train, *places, str(folder / "not terminated"), {**OPTIONS, "save_steps": 0})
    assert ranks(1, same_weights, out / "final", folder / "not terminated" / "final") == [True]


def train_on_a_full_disk(model: str, store: str, out: str, options: dict[str, Any], names: list[str]) -> None:
    """The second checkpoint has no room for these of its files."""
    from mca_lib.checkpoint import saver

    staging, done = saver._staging, []

    def full(output_dir):
        made = staging(output_dir)
        done.append(made)
        for name in names if len(done) == 2 else ():
            (made / name).symlink_to("/dev/full")
        return made

    saver._staging = full
    train(model, store, out, options)


@pytest.mark.parametrize(
    ("async_save", "names"), [(True, ["state/__0_0.distcp", "state/__0_1.distcp"]), (False, ["rng_1.pt"])]
)
def test_a_full_disk_is_an_error_of_all_ranks_and_leaves_nothing_behind(ranks, folder, places, async_save, names):
    out = folder / f"full {async_save}"
    with pytest.raises(RankError) as failure:
        ranks(2, train_on_a_full_disk, *places, str(out), {**OPTIONS, "async_save": async_save}, names)
    named = f"OSError: [Errno 28] No space left on device: '{out}/.staging-"
    assert str(failure.value).count(named) == 2, failure.value
    assert [path.name for path in out.iterdir() if path.is_dir()] == ["checkpoint-2"]
