"""Which checkpoints stay."""

import json
import shutil
from pathlib import Path

import pytest

from mca_lib.checkpoint.retention import Retention


def make(folder: Path, steps: range, best: dict[int, int] | None = None) -> None:
    """`checkpoint-N` for each step; `best`: step → the best step until then, whose weights are made too."""
    for step in steps:
        (folder / f"checkpoint-{step}").mkdir()
        named = {"step": best[step], "loss": 1.0} if best else None
        (folder / f"checkpoint-{step}" / "trainer.json").write_text(json.dumps({"best": named}))
    for step in set(best.values()) if best else ():
        (folder / f"best-{step}").mkdir()


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (Retention(), [2, 4, 6, 8, 10]),
        (Retention(newest=2), [8, 10]),
        (Retention(newest=1, every=4), [4, 8, 10]),
        (Retention(newest=9), [2, 4, 6, 8, 10]),
    ],
)
def test_the_newest_stay_and_multiples(tmp_path, keep, kept):
    make(tmp_path, range(2, 11, 2))
    others = ["damaged-checkpoint-4-abc", "checkpoint-²", "checkpoint-4x"]
    for name in others:
        (tmp_path / name).mkdir()
    keep.apply(tmp_path)
    assert left(tmp_path) == sorted([*(f"checkpoint-{step}" for step in kept), *others])


def test_the_best_weights_stay_while_a_checkpoint_names_them(tmp_path):
    make(tmp_path, range(2, 9, 2), {2: 2, 4: 3, 6: 3, 8: 7})
    (tmp_path / "best-9").mkdir()  # newer than all: the next checkpoint is going to name it
    Retention(newest=2).apply(tmp_path)
    assert left(tmp_path) == ["best-3", "best-7", "best-9", "checkpoint-6", "checkpoint-8"]


def test_a_removal_that_fails_is_a_warning(tmp_path, monkeypatch, caplog):
    make(tmp_path, range(1, 4))

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    Retention(newest=1).apply(tmp_path)
    assert caplog.text.count("cannot be removed: Permission denied") == 2
    assert (tmp_path / "checkpoint-3").is_dir()
