"""Artifacts as a file: what arrives is what was sent, and nothing else gets in."""

import io
import tarfile
from pathlib import Path

import pytest

from tasks.errors import StoreError
from tasks.stage import Artifact, ensure
from tasks.store import ArtifactStore
from tasks.transfer import export_bundle, import_bundle
from tests.tasks.toys import Copy, Letter, whole


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


@pytest.fixture
def other(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "other")


@pytest.fixture
def copy(store: ArtifactStore) -> Artifact:
    return ensure(store, Copy(ensure(store, Letter("hello")).artifact)).artifact


@pytest.fixture
def bundle(store: ArtifactStore, copy: Artifact, tmp_path: Path) -> Path:
    export_bundle(store, copy, tmp_path / "bundle.tar")
    return tmp_path / "bundle.tar"


def test_an_artifact_arrives_with_its_lineage_and_is_a_hit(
    store: ArtifactStore, other: ArtifactStore, bundle: Path
) -> None:
    lines: list[str] = []
    assert [a.stage for a in import_bundle(other, bundle, lines.append)] == ["letter", "copy"]
    assert whole(other)
    assert [a.record for a in other.ls()] == [a.record for a in store.ls()]
    letter = ensure(other, Letter("hello"))
    assert letter.cached
    assert ensure(other, Copy(letter.artifact)).cached
    import_bundle(other, bundle, lines.append)
    assert [line.split("  ")[1] for line in lines] == ["imported"] * 2 + ["is in the store already"] * 2


def test_without_lineage_only_the_artifact_travels(
    store: ArtifactStore, other: ArtifactStore, copy: Artifact, tmp_path: Path
) -> None:
    export_bundle(store, copy, tmp_path / "one.tar", with_lineage=False)
    assert [a.stage for a in import_bundle(other, tmp_path / "one.tar")] == ["copy"]


def test_a_damaged_copy_in_the_other_store_is_replaced(other: ArtifactStore, bundle: Path) -> None:
    import_bundle(other, bundle)
    path = other.ls("copy")[0].path / "copy.txt"
    path.chmod(0o644)
    path.write_text("x")
    import_bundle(other, bundle)
    assert whole(other)


def test_damage_does_not_leave_the_store(store: ArtifactStore, copy: Artifact, tmp_path: Path) -> None:
    path = copy.path / "copy.txt"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"h", b"j", 1))
    with pytest.raises(StoreError, match="has other bytes"):
        export_bundle(store, copy, tmp_path / "bundle.tar")
    assert not list(tmp_path.glob("*bundle*"))


def test_an_existing_file_is_not_overwritten(store: ArtifactStore, copy: Artifact, bundle: Path) -> None:
    with pytest.raises(StoreError, match="exists"):
        export_bundle(store, copy, bundle)


def _rewritten(bundle: Path, change) -> Path:
    """The archive with every member passed through `change(member, data)`."""
    target = bundle.with_name("changed.tar")
    with tarfile.open(bundle) as source, tarfile.open(target, "w") as sink:
        for member in source:
            data = source.extractfile(member).read()
            for new_member, new_data in change(member, data):
                new_member.size = len(new_data)
                sink.addfile(new_member, io.BytesIO(new_data))
    return target


def _flipped(member, data):
    return [(member, data.replace(b"hello", b"jello") if member.name.endswith("0/0.txt") else data)]


def _more(member, data):
    extra = tarfile.TarInfo(member.name.rpartition("/")[0] + "/extra.txt")
    return [(member, data), (extra, b"x")] if member.name.endswith("copy.txt") else [(member, data)]


def _climbing(member, data):
    return [(member, data), (tarfile.TarInfo("letter/../../../up.txt"), b"x")]


def _link(member, data):
    link = tarfile.TarInfo("letter/key/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return [(member, data), (link, b"")]


def _shallow(member, data):
    return [(tarfile.TarInfo("file.txt"), data)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_flipped, "has other bytes than its record says"),
        (_more, "extra.txt is not what its record says"),
        (_climbing, "no whole archive"),
        (_link, "has no place"),
        (_shallow, "has no place"),
    ],
)
def test_nothing_gets_in_that_its_record_does_not_know(other: ArtifactStore, bundle: Path, change, said: str) -> None:
    with pytest.raises(StoreError, match=said):
        import_bundle(other, _rewritten(bundle, change))
    assert other.ls("copy") == []
    assert not list(other.root.parent.glob("up.txt"))
    assert not list(other.staging.iterdir())


@pytest.mark.parametrize("content", [None, b"", b"no tar at all" * 100])
def test_what_is_no_archive_is_refused(other: ArtifactStore, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.tar"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StoreError, match=r"x\.tar: (no such file|no whole archive|holds no artifacts)"):
        import_bundle(other, path)


def test_half_an_archive_is_refused(other: ArtifactStore, bundle: Path) -> None:
    bundle.write_bytes(bundle.read_bytes()[:9000])
    with pytest.raises(StoreError):
        import_bundle(other, bundle)
    assert whole(other)
