"""A store that machines share: computed by one is fetched by the other, and never believed without a look."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.errors import StoreError
from tasks.record import RECORD_NAME
from tasks.stage import Outcome, ensure, probe
from tasks.store import ArtifactStore
from tests.tasks.toys import Copy, Letter, start, whole


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/shared"
        return
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().makedirs("bucket", exist_ok=True)  # the server forgets nothing within a process
    yield f"s3://bucket/{tmp_path.name}"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


class Notes:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def progress(self, done, total, **metrics) -> None: ...

    def info(self, text: str) -> None: ...

    def warning(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture
def notes() -> Notes:
    return Notes()


def make(folder: Path, url: str, notes: Notes, text: str = "hello") -> tuple[Outcome, Outcome]:
    """A letter and its copy, in the store of one machine."""
    store = ArtifactStore(folder, remote=url)
    letter = ensure(store, Letter(text), reporter=notes)
    return letter, ensure(store, Copy(letter.artifact), reporter=notes)


def test_what_one_machine_computed_the_other_fetches(url: str, tmp_path: Path, notes: Notes) -> None:
    first = make(tmp_path / "a", url, notes)
    second = make(tmp_path / "b", url, notes)
    assert [outcome.cached for outcome in (*first, *second)] == [False, False, True, True]
    assert [o.artifact.record for o in first] == [o.artifact.record for o in second]
    assert whole(ArtifactStore(tmp_path / "b"))
    assert notes.warnings == []


def test_a_plan_asks_once_for_what_is_there(tmp_path: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/shared"
    make(tmp_path / "a", url, notes)
    store = ArtifactStore(tmp_path / "b", remote=url)
    asked: list[str] = []
    pointer = store.remote._pointer
    monkeypatch.setattr(store.remote, "_pointer", lambda stage, key: asked.append(stage) or pointer(stage, key))
    for text in ("hello", "hello", "bye", "bye"):
        assert probe(store, Letter(text)).remote == (text == "hello")
    assert asked == ["letter", "letter"]
    # Another machine may have finished since.
    make(tmp_path / "a", url, notes, "bye")
    assert ensure(store, Letter("bye"), reporter=notes).cached


def test_a_damaged_payload_there_is_computed_and_replaced(url: str, tmp_path: Path, notes: Notes) -> None:
    first = make(tmp_path / "a", url, notes)
    fs, root = ArtifactStore(tmp_path / "a", remote=url).remote._open()
    key = first[1].artifact.key
    path = next(p for p in fs.find(f"{root}/copy/{key}") if p.endswith("copy.txt"))
    fs.pipe_file(path, fs.cat_file(path).replace(b"hello", b"jello"))
    second = make(tmp_path / "b", url, notes)
    assert [outcome.cached for outcome in second] == [True, False]
    assert [w for w in notes.warnings if "copy.txt has other bytes" in w]
    assert second[1].artifact.record.files == first[1].artifact.record.files


@pytest.mark.parametrize("content", [b"", b"[]", b'{"record": 1, "upload": "a"}', b'{"record": {}, "upload": "../x"}'])
def test_a_record_that_is_none_is_not_believed(tmp_path: Path, notes: Notes, content: bytes) -> None:
    url = f"file://{tmp_path}/shared"
    first = make(tmp_path / "a", url, notes)
    pointer = tmp_path / "shared" / "copy" / first[1].artifact.key / RECORD_NAME
    pointer.write_bytes(content)
    second = make(tmp_path / "b", url, notes)
    assert [outcome.cached for outcome in second] == [True, False]
    assert [w for w in notes.warnings if "not used" in w]
    assert json.loads(pointer.read_bytes())["record"]["key"] == first[1].artifact.key  # mended
    assert make(tmp_path / "c", url, notes)[1].cached


def test_an_upload_that_was_killed_is_no_artifact(tmp_path: Path, notes: Notes) -> None:
    url = f"file://{tmp_path}/shared"
    first = make(tmp_path / "a", url, notes)
    (tmp_path / "shared" / "copy" / first[1].artifact.key / RECORD_NAME).unlink()  # the last thing that is written
    assert not make(tmp_path / "b", url, notes)[1].cached
    assert notes.warnings == []


def test_two_machines_at_once_leave_one_whole_artifact(tmp_path: Path, notes: Notes) -> None:
    url = f"file://{tmp_path}/shared"
    code = "s = ArtifactStore(sys.argv[1], remote=sys.argv[2])\nfor i in range(5): ensure(s, Letter(f'{i}', files=20))"
    runs = [start(code, tmp_path / name, url) for name in "abc"]
    assert [(run.wait(60), run.stdout.read()) for run in runs] == [(0, "")] * 3
    store = ArtifactStore(tmp_path / "d", remote=url)
    assert all(ensure(store, Letter(f"{i}", files=20), reporter=notes).cached for i in range(5))
    assert whole(store)
    assert notes.warnings == []


def test_a_store_that_does_not_answer_costs_a_warning(tmp_path: Path, notes: Notes, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "secret-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-key")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    store = ArtifactStore(tmp_path / "a", remote="s3://bucket/x")
    assert not ensure(store, Letter("hello"), reporter=notes).cached
    assert ["cannot be fetched" in w or "cannot be stored there" in w for w in notes.warnings] == [True, True]
    assert "secret" not in " ".join(notes.warnings)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("bucket/x", "is no URL"),
        ("s3://", "is no URL"),
        ("s3://id:secret@bucket/x", "holds credentials"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(tmp_path: Path, url: str, said: str) -> None:
    with pytest.raises(StoreError, match=said) as refusal:
        ArtifactStore(tmp_path, remote=url)
    assert "secret" not in str(refusal.value)
