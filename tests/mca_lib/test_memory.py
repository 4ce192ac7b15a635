"""Memory that is available: the limits of containers count, not only the machine's."""

from pathlib import Path

import psutil
import pytest

from mca_lib.memory import _left_in_cgroups, available_memory

GB = 1 << 30


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_version_2_counts_every_group_above(tmp_path: Path) -> None:
    write(tmp_path, memory__max="max", memory__current="0")
    write(tmp_path / "a", memory__max=str(8 * GB), memory__current=str(6 * GB), memory__stat=f"inactive_file {GB}")
    write(tmp_path / "a" / "b", memory__max=str(9 * GB), memory__current=str(GB))
    (tmp_path / "self").write_text("0::/a/b\n")
    assert sorted(_left_in_cgroups(tmp_path, tmp_path / "self")) == [3 * GB, 8 * GB]


def test_version_1_has_a_hierarchy_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "memory" / "job"
    write(
        folder, memory__limit_in_bytes=str(4 * GB), memory__usage_in_bytes=str(GB), memory__stat="total_inactive_file 0"
    )
    (tmp_path / "self").write_text("9:cpu,cpuacct:/other\n4:memory:/job\n0::/\n")
    assert list(_left_in_cgroups(tmp_path, tmp_path / "self")) == [3 * GB]


def test_group_that_is_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    write(tmp_path / "a", memory__max=str(GB), memory__current=str(2 * GB))
    (tmp_path / "self").write_text("0::/a\n")
    assert list(_left_in_cgroups(tmp_path, tmp_path / "self")) == [0]


def test_no_cgroups_is_no_limit(tmp_path: Path) -> None:
    assert list(_left_in_cgroups(tmp_path, tmp_path / "absent")) == []


def test_never_more_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < available_memory() <= psutil.virtual_memory().total
