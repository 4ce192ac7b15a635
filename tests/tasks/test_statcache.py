"""Digests remembered by stat: what may be remembered, and what is never believed."""

import json
import os
import time
from pathlib import Path

import pytest

from tasks import statcache
from tasks.digests import digest_file
from tasks.statcache import StatCache
from tests.tasks.toys import start


@pytest.fixture
def cache(tmp_path: Path) -> StatCache:
    return StatCache(tmp_path / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "f").write_bytes(b"aaaa")
    return tmp_path / "data"


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing takes place a minute after everything else."""
    monkeypatch.setattr(statcache.time, "time_ns", lambda: int((time.time() + 60) * 1e9))


def remember(cache: StatCache, folder: Path) -> None:
    files = cache.folder(folder)
    files.digest(folder / "f", "f")
    files.save()


def test_settled_file_is_read_once(cache: StatCache, folder: Path, later: None) -> None:
    remember(cache, folder)
    assert cache.folder(folder).digest(folder / "f", "f") == (4, digest_file(folder / "f"), True)


def test_file_that_was_hashed_in_the_tick_of_its_change_is_not_remembered(cache: StatCache, folder: Path) -> None:
    (folder / "f").write_bytes(b"bbbb")
    remember(cache, folder)
    assert cache.folder(folder).entries == {}


def test_change_in_the_same_tick_as_hashing_is_seen(
    cache: StatCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = statcache._stamp

    def coarse(stat: os.stat_result) -> list[int]:
        size, mtime, ctime, *where = fine(stat)
        tick = 2 * 10**9
        return [size, mtime // tick * tick, ctime // tick * tick, *where]

    monkeypatch.setattr(statcache, "_stamp", coarse)
    for i in range(50):
        files = cache.folder(folder)
        (folder / "f").write_bytes(b"%04d" % i)
        assert files.digest(folder / "f", "f")[1] == digest_file(folder / "f")
        files.save()


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.write_bytes(b"aaab"),
        lambda f: f.write_bytes(b"aaaaa"),
        lambda f: (f.unlink(), f.write_bytes(b"aaab")),
    ],
    ids=["same size", "other size", "other inode"],
)
def test_changed_file_is_read_again_even_with_its_old_mtime(
    cache: StatCache, folder: Path, later: None, change
) -> None:
    remember(cache, folder)
    before = os.stat(folder / "f")
    change(folder / "f")
    os.utime(folder / "f", ns=(before.st_atime_ns, before.st_mtime_ns))
    _, digest, remembered = cache.folder(folder).digest(folder / "f", "f")
    assert (digest, remembered) == (digest_file(folder / "f"), False)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"f"', '"g"'),
        lambda text: text.replace(json.loads(text)["entries"]["f"][-1][:8], "00000000"),
        lambda text: "[]",
        lambda text: "{}",
        lambda text: "",
        lambda text: "\x00" * len(text),
    ],
)
def test_damaged_cache_is_ignored_and_rewritten(cache: StatCache, folder: Path, later: None, damage) -> None:
    remember(cache, folder)
    (file,) = cache.root.iterdir()
    file.write_text(damage(file.read_text()))
    assert cache.folder(folder).digest(folder / "f", "f") == (4, digest_file(folder / "f"), False)
    remember(cache, folder)
    assert cache.folder(folder).digest(folder / "f", "f")[2]


def test_unwritable_cache_costs_nothing_but_time(folder: Path, later: None) -> None:
    cache = StatCache(folder / "f")  # a file where the folder should be
    remember(cache, folder)
    assert cache.folder(folder).digest(folder / "f", "f") == (4, digest_file(folder / "f"), False)


def test_concurrent_writers_leave_a_whole_cache(cache: StatCache, folder: Path) -> None:
    code = (
        "from tasks.statcache import StatCache\n"
        "for i in range(50):\n"
        "    files = StatCache(Path(sys.argv[1])).folder(Path(sys.argv[2]))\n"
        "    files.entries['f'] = [i] * 500\n"
        "    files.changed = True\n"
        "    files.save()\n"
    )
    writers = [start(code, cache.root, folder) for _ in range(2)]
    while any(writer.poll() is None for writer in writers):
        (entry,) = cache.folder(folder).entries.values() or [[0]]
        assert len(set(entry)) == 1
    assert [writer.communicate()[0] for writer in writers] == [""] * 2
    assert len(list(cache.root.iterdir())) == 1
