"""A directory appears whole or not at all."""

from pathlib import Path

import pytest

from mca_lib.checkpoint.publish import published
from mca_lib.errors import ConfigError


@pytest.mark.parametrize("exists", [True, False])
def test_it_appears_at_the_end(tmp_path: Path, exists: bool) -> None:
    target = tmp_path / "deep" / "target"
    if exists:
        target.mkdir(parents=True)
    with published(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists() or not list(target.iterdir())
    assert [p.name for p in target.iterdir()] == ["a"]
    assert [p.name for p in target.parent.iterdir()] == ["target"]


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with published(tmp_path / "target") as folder:
            (folder / "a").write_text("1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


def test_failure_keeps_what_was_to_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "old").write_text("1")
    with pytest.raises(RuntimeError), published(tmp_path / "target", replace=True):
        raise RuntimeError
    assert [p.name for p in (tmp_path / "target").iterdir()] == ["old"]


def test_what_is_there_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "old").write_text("1")
    with pytest.raises(ConfigError, match="exists and is not empty"), published(tmp_path / "target"):
        pytest.fail("the work began")


def test_folder_of_a_dead_run_is_known_by_the_name_up_to_the_last_dot(tmp_path: Path) -> None:
    """The store removes what a dead run left by that name; see `tasks.compute`."""
    with published(tmp_path / "convert-key.1.abcd") as folder:
        assert folder.name.rpartition(".")[0] == "convert-key.1"
