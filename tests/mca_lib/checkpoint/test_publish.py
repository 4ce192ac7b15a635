"""A directory appears whole or not at all."""

import os
import signal
import subprocess
import sys
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


def test_what_filled_the_target_meanwhile_stays_and_the_result_is_kept_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()

    def work() -> None:
        with published(target) as folder:
            (folder / "a").write_text("1")
            (target / "precious").write_text("2")

    with pytest.raises(ConfigError, match=r"was filled meanwhile .* the finished result is (\S+)") as error:
        work()
    kept = Path(str(error.value).rpartition(" ")[2])
    assert [p.name for p in target.iterdir()] == ["precious"]
    assert [p.name for p in kept.iterdir()] == ["a"]
    assert sorted(tmp_path.iterdir()) == sorted([target, kept])


def test_of_two_that_publish_at_once_one_is_told(tmp_path: Path) -> None:
    def second() -> None:
        with published(tmp_path / "target") as mine:
            (mine / "a").write_text("second")
            with published(tmp_path / "target") as other:
                (other / "a").write_text("first")

    with pytest.raises(ConfigError, match="was filled meanwhile"):
        second()
    assert (tmp_path / "target" / "a").read_text() == "first"


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_symbolic_link_is_refused_before_the_work(tmp_path: Path, there: bool, replace: bool) -> None:
    if there:
        (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with pytest.raises(ConfigError, match="is a symbolic link"), published(tmp_path / "link", replace=replace):
        pytest.fail("the work began")
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("name", ["x" * 250, "x" * 300, "file/below"])
def test_name_that_no_folder_can_have_is_refused_before_the_work(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("1")
    with pytest.raises(ConfigError, match="no folder can be made there"), published(tmp_path / name):
        pytest.fail("the work began")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


CODE = """
import os, signal, sys
from mca_lib.checkpoint.publish import published
with published(sys.argv[1]) as folder:
    (folder / "a").write_text("1")
    print(folder, flush=True)
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


def test_next_run_removes_what_a_killed_one_left_and_nothing_of_a_living_one(tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "out"), "SIGKILL"], capture_output=True, text=True
    )
    dead = Path(killed.stdout.strip())
    living = subprocess.Popen(
        [sys.executable, "-c", CODE, str(tmp_path / "out"), "SIGSTOP"], stdout=subprocess.PIPE, text=True
    )
    try:
        alive = Path(living.stdout.readline().strip())
        assert not dead.exists()  # the second run began after the first had died
        users = [tmp_path / name for name in ("out-partial-of-mine", "out-partial-0123456789ab", f"x{alive.name}")]
        for folder in users:
            folder.mkdir()
        with published(tmp_path / "out"):
            assert alive.is_dir()
        assert all(folder.is_dir() for folder in users)
    finally:
        os.kill(living.pid, signal.SIGKILL)
        living.communicate()
    with published(tmp_path / "other"):
        assert alive.is_dir()
