"""What is served is whole, what is damaged is named and never served, and refusals are one line."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.errors import StoreError
from tasks.record import RECORD_NAME
from tasks.stage import Artifact, Miss, ensure, probe
from tasks.store import ArtifactStore
from tasks.verify import Damage
from tests.tasks.toys import Copy, Letter, whole


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def make(store: ArtifactStore, text: str = "hello") -> Artifact:
    return ensure(store, Letter(text)).artifact


def flip(path: Path, position: int = 5) -> None:
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def flip_keeping_mtime(path: Path) -> None:
    before = os.stat(path)
    flip(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_out(path: Path) -> None:
    outside = path.parents[4] / "outside.txt"
    path.rename(outside)
    path.symlink_to(outside)


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    # what is done to <artifact>/folder1/1.txt: (how, file that is named, reason that is given)
    "flipped bit": (flip, "folder1/1.txt", "has other bytes than were published"),
    "flipped bit, old mtime": (flip_keeping_mtime, "folder1/1.txt", "has other bytes than were published"),
    "truncated": (lambda f: os.truncate(f, 100), "folder1/1.txt", "has 100 bytes instead of 800"),
    "longer": (lambda f: (f.chmod(0o644), f.open("a").write("x")), "folder1/1.txt", "has 801 bytes instead of 800"),
    "deleted": (Path.unlink, "folder1/1.txt", "is missing"),
    "a folder instead": (replace_by_folder, "folder1/1.txt", ""),
    "link to the outside": (link_out, "", "folder1/1.txt is a symbolic link"),
    "foreign file": (lambda f: (f.parent / "extra.py").write_text(""), "folder1/extra.py", "is not in the record"),
    "no record": (lambda f: (f.parents[1] / RECORD_NAME).unlink(), RECORD_NAME, "has no record"),
    "empty record": (lambda f: os.truncate(f.parents[1] / RECORD_NAME, 0), RECORD_NAME, "is unreadable"),
    "half a record": (lambda f: os.truncate(f.parents[1] / RECORD_NAME, 500), RECORD_NAME, "is unreadable"),
}


@pytest.mark.parametrize(("damage", "file", "reason"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_is_named_quarantined_and_recomputed(
    store: ArtifactStore, damage: Callable[[Path], object], file: str, reason: str
) -> None:
    artifact, neighbour = make(store), make(store, "other")
    damage(artifact.path / "folder1" / "1.txt")
    found = store.inspect("letter", artifact.key)
    assert isinstance(found, Damage)
    assert found.file == file
    assert reason in found.reason
    outcome = ensure(store, Letter("hello"))
    assert not outcome.cached
    assert outcome.reason == f"damaged: {found}"
    assert outcome.artifact.digest == artifact.digest
    assert whole(store)
    assert ensure(store, Letter("other")).cached
    assert neighbour.path.exists()
    (note,) = (store.root / ".quarantine").glob("*.reason.txt")
    assert note.read_text() == f"{found}\n"


def test_flipped_bit_anywhere_in_the_record_is_found(store: ArtifactStore) -> None:
    artifact = make(store)
    record = artifact.path / RECORD_NAME
    good = json.loads(record.read_bytes())
    for position in range(0, record.stat().st_size, 7):
        flip(record, position)
        found = store.inspect("letter", artifact.key)
        # White space between the fields means nothing; everything else does.
        assert isinstance(found, Damage) or json.loads(record.read_bytes()) == good
        flip(record, position)
    assert isinstance(store.inspect("letter", artifact.key), Artifact)


def test_touched_but_equal_file_is_a_hit(store: ArtifactStore) -> None:
    artifact = make(store)
    os.utime(artifact.path / "folder1" / "1.txt", (1, 1))
    assert ensure(store, Letter("hello")).cached


def test_rot_that_no_stat_shows_is_found_by_full_and_remembered(store: ArtifactStore) -> None:
    artifact = make(store)
    file = artifact.path / "folder1" / "1.txt"
    flip(file)
    forge_stat_cache(store, artifact)
    assert isinstance(store.inspect("letter", artifact.key), Artifact)
    assert [str(damage) for _, _, damage in store.verify()] == ["None"]
    (damage,) = [damage for _, _, damage in store.verify(full=True)]
    assert damage.file == "folder1/1.txt"
    assert not ensure(store, Letter("hello")).cached


def forge_stat_cache(store: ArtifactStore, artifact: Artifact) -> None:
    """As if the bytes had changed below the file system."""
    cache = store.statcache.folder(artifact.path)
    for rel, entry in artifact.record.files.items():
        stat = os.stat(artifact.path / rel)
        stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]
        cache.entries[rel] = [*stamp, entry.digest]
    cache.changed = True
    cache.save()


def test_wrong_digest_in_the_stat_cache_condemns_nothing(store: ArtifactStore) -> None:
    artifact = make(store)
    forge_stat_cache(store, artifact)
    cache = store.statcache.folder(artifact.path)
    cache.entries["folder1/1.txt"][-1] = "0" * 64
    cache.changed = True
    cache.save()
    assert ensure(store, Letter("hello")).cached


def test_artifact_under_another_key_is_not_served(store: ArtifactStore) -> None:
    one, other = make(store, "one"), make(store, "other")
    os.rename(other.path, store.root / "aside")
    os.rename(one.path, other.path)
    assert "belongs to letter/" in str(store.inspect("letter", other.key))


def test_published_files_are_read_only(store: ArtifactStore) -> None:
    artifact = make(store)
    modes = {path.stat().st_mode & 0o777 for path in artifact.path.rglob("*") if path.is_file()}
    assert modes == {0o444}


def test_record_tells_what_the_key_was_made_of(store: ArtifactStore) -> None:
    record = make(store).record
    assert record.payload == {
        "stage": "letter", "version": 1, "identity": {"text": "hello", "files": 3}, "inputs": {}
    }  # fmt: skip
    assert record.stats == {"files": 3}
    assert record.producer.pid == os.getpid()
    assert "python" in record.producer.libraries


def test_record_of_a_newer_release_is_neither_served_nor_moved(store: ArtifactStore) -> None:
    artifact = make(store)
    record = artifact.path / RECORD_NAME
    record.chmod(0o644)
    record.write_text(json.dumps(json.loads(record.read_bytes()) | {"format": 99}))
    with pytest.raises(StoreError, match="newer mcaflow"):
        ensure(store, Letter("hello"))
    assert record.exists()


# -- looking around ----------------------------------------------------------------------------------------------


def test_find_takes_a_prefix_that_fits_one_artifact(store: ArtifactStore) -> None:
    letter = make(store)
    copy = ensure(store, Copy(letter)).artifact
    assert store.find(letter.key[:8]).key == letter.key
    assert store.find(f"copy/{copy.key[:4]}").key == copy.key
    assert store.find("copy/").key == copy.key
    with pytest.raises(StoreError, match="fits 2 artifacts"):
        store.find("")
    with pytest.raises(StoreError, match="no artifact"):
        store.find("nothing")


def test_lineage_goes_back_to_the_sources(store: ArtifactStore) -> None:
    letter = make(store)
    copy = ensure(store, Copy(letter)).artifact
    lineage = store.lineage(copy)
    (source,) = lineage.inputs
    assert (source.role, source.stage, source.key) == ("letter", "letter", letter.key)
    assert source.artifact is not None
    store.quarantine(Damage("letter", letter.key, "", "was moved by a test"))
    assert store.lineage(copy).inputs[0].artifact is None


def test_ls_lists_artifacts_and_nothing_half(store: ArtifactStore) -> None:
    make(store)
    (store.root / "letter" / "0123").mkdir()
    assert [artifact.stage for artifact in store.ls()] == ["letter"]
    assert store.ls("copy") == []


def test_nearest_is_the_record_with_the_fewest_differences(store: ArtifactStore) -> None:
    letter = make(store)
    ensure(store, Copy(letter, "bold"))
    far = ensure(store, Copy(make(store, "other"), "thin")).artifact
    assert store.nearest("copy", far.record.payload | {"version": 2}).key == far.key


# -- refusals ----------------------------------------------------------------------------------------------------


def test_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="not a directory"):
        ArtifactStore(tmp_path / "file")
    with pytest.raises(StoreError, match="part of the path is not a directory"):
        ArtifactStore(tmp_path / "file" / "store")


def test_missing_store_is_not_created_for_reading(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no artifact store"):
        ArtifactStore(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()


def test_folder_that_cannot_be_written_is_refused_before_anything_runs(store: ArtifactStore, tmp_path: Path) -> None:
    store.staging.write_text("a file where the folder should be")
    log = tmp_path / "log"
    with pytest.raises(StoreError, match="cannot be written"):
        store.require_writable()
    with pytest.raises(StoreError, match="cannot be written"):
        ensure(store, Letter("hello", log))
    assert not log.exists()


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.ENOSPC, "disk is full"), (errno.EDQUOT, "quota"), (errno.EROFS, "read-only"), (errno.EACCES, "denied")],
)
@pytest.mark.parametrize("call", ["link", "fsync", "rename"])
def test_refusal_of_the_file_system_is_one_line_and_leaves_nothing(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, code: int, words: str, call: str
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as broken:
        broken.setattr(os, call, refuse)
        with pytest.raises(StoreError, match=words) as caught:
            ensure(store, Letter("hello"))
    assert "\n" not in str(caught.value)
    assert list(store.staging.glob("*")) == []
    assert list(store.leases.iterdir()) == []
    assert store.ls() == []
    assert not ensure(store, Letter("hello")).cached


def test_store_that_cannot_be_written_still_serves_hits(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    make(store)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for call in ("mkdir", "rename", "replace", "link", "unlink", "utime"):
        monkeypatch.setattr(os, call, refuse)
    monkeypatch.setattr("tempfile.mkstemp", refuse)
    assert ensure(store, Letter("hello")).cached
    assert isinstance(probe(store, Letter("other")), Miss)


def test_full_disk_is_refused_before_the_stage_starts(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("tasks.store.shutil.disk_usage", lambda path: usage)
    log = tmp_path / "log"
    with pytest.raises(StoreError, match=r"stage letter needs 16\.8 MB and 0\.0 MB are free"):
        ensure(store, Letter("hello", log))
    assert not log.exists()
