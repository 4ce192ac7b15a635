"""The download stage against local directories and against a hub on the loopback interface."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mca_lib.errors import ModelError
from mca_lib.hub import import_modelscope
from tasks.download import DownloadStage, ModelConfig
from tasks.errors import StoreError
from tasks.stage import Hit, Miss, Outcome, ensure, probe
from tasks.store import ArtifactStore
from tests.tasks.loopback_hub import LoopbackHub, serve
from tests.tasks.tiny_files import safetensors

REPO = "maker/tiny"
TOKEN = "hf_" + "s" * 30


class Notes:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.bytes: list[float] = []

    def progress(self, done: float, total: float | None, **metrics: object) -> None:
        self.bytes.append(done)

    def info(self, text: str) -> None:
        self.lines.append(text)

    warning = info


def model(size: int = 1 << 20) -> dict[str, bytes]:
    return {
        "config.json": b'{"model_type": "llama"}',
        "generation_config.json": b"{}",
        "model.safetensors": safetensors({"a": size}),
        "tokenizer.json": b'{"version": "1.0"}',
        "README.md": b"not needed",
        "onnx/model.onnx": b"not needed",
    }


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    with serve() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", running.endpoint)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield running


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def download(store: ArtifactStore, notes: Notes | None = None, **config: object) -> Outcome:
    config = {"name_or_path": REPO} | config
    return ensure(store, DownloadStage(ModelConfig(**config)), reporter=notes)


# -- local -------------------------------------------------------------------------------------------------------


def test_local_directory_is_passed_through(store: ArtifactStore, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", model())
    artifact = download(store, name_or_path=str(folder)).artifact
    assert artifact.path == folder
    assert set(artifact.record.files) == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"
    }  # fmt: skip
    assert set(artifact.parts) == {"config", "generation", "tokenizer", "weights"}
    assert [path.name for path in store.location("download", artifact.key).iterdir()] == [".artifact.json"]


def test_touched_local_file_is_a_hit(store: ArtifactStore, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", model())
    download(store, name_or_path=str(folder))
    os.utime(folder / "model.safetensors", (1, 1))
    assert download(store, name_or_path=str(folder)).cached


def test_irrelevant_local_file_is_a_hit(store: ArtifactStore, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", model())
    download(store, name_or_path=str(folder))
    (folder / "notes.txt").write_text("x")
    assert download(store, name_or_path=str(folder)).cached


def test_changed_tokenizer_is_a_miss_that_names_the_file_and_leaves_the_weights_alone(
    store: ArtifactStore, tmp_path: Path
) -> None:
    folder = write(tmp_path / "model", model())
    before = download(store, name_or_path=str(folder)).artifact
    (folder / "tokenizer.json").write_text('{"version": "2.0"}')
    verdict = probe(store, DownloadStage(ModelConfig(name_or_path=str(folder))))
    assert isinstance(verdict, Miss)
    assert [change.field for change in verdict.changed] == ["identity.files.tokenizer.json"]
    after = download(store, name_or_path=str(folder)).artifact
    assert after.parts["weights"] == before.parts["weights"]
    assert after.parts["tokenizer"] != before.parts["tokenizer"]


def test_copy_of_a_local_directory_is_a_hit_that_is_used_where_it_lies(store: ArtifactStore, tmp_path: Path) -> None:
    first = download(store, name_or_path=str(write(tmp_path / "one", model())))
    second = download(store, name_or_path=str(write(tmp_path / "two", model())))
    assert second.cached
    assert second.artifact.key == first.artifact.key
    assert second.artifact.path == tmp_path / "two"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: (m / "config.json").unlink(), "no config.json"),
        (lambda m: (m / "config.json").write_text("{"), "config.json: cannot be read as JSON"),
        (lambda m: (m / "config.json").write_text("{}"), "no model_type"),
        (lambda m: (m / "model.safetensors").unlink(), "no weights"),
        (lambda m: (m / "model.safetensors").rename(m / "pytorch_model.bin"), "model.allow_pickle=true"),
        (lambda m: os.truncate(m / "model.safetensors", 1000), "model.safetensors: 1000 bytes instead of"),
        (lambda m: (m / "adapter_config.json").write_text("{}"), r"PEFT adapter \(adapter_config.json\).* merge it"),
        (lambda m: (m / "adapter_model.safetensors").write_text(""), r"PEFT adapter \(adapter_model.safetensors\)"),
        (lambda m: os.truncate(m / "model.safetensors", 5), "model.safetensors: not a whole safetensors file"),
    ],
)
def test_unusable_local_directory_is_refused_on_one_line(
    store: ArtifactStore, tmp_path: Path, change, complaint: str
) -> None:
    folder = write(tmp_path / "model", model())
    change(folder)
    with pytest.raises(ModelError, match=complaint) as caught:
        download(store, name_or_path=str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "~/no-such-model"])
def test_missing_local_directory_is_refused_without_asking_a_hub(
    store: ArtifactStore, hub: LoopbackHub, name: str
) -> None:
    with pytest.raises(ModelError, match="there is no directory"):
        download(store, name_or_path=name)
    assert hub.requests == []


# -- hub ---------------------------------------------------------------------------------------------------------


def test_hub_model_is_pinned_to_its_commit(store: ArtifactStore, hub: LoopbackHub) -> None:
    files = model()
    commit = hub.push(REPO, files)
    notes = Notes()
    artifact = download(store, notes).artifact
    assert artifact.record.payload["identity"]["commit"] == artifact.stats["commit"] == commit
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in artifact.path.iterdir()} == wanted | {".artifact.json"}
    assert all((artifact.path / name).read_bytes() == files[name] for name in wanted)
    assert notes.bytes[-1] == sum(len(files[name]) for name in wanted)
    assert download(store).cached


def test_hub_and_directory_with_the_same_files_have_the_same_digest(
    store: ArtifactStore, hub: LoopbackHub, tmp_path: Path
) -> None:
    hub.push(REPO, model())
    local = download(store, name_or_path=str(write(tmp_path / "model", model()))).artifact
    remote = download(store).artifact
    assert (remote.digest, remote.parts) == (local.digest, local.parts)


def test_moved_revision_is_a_new_artifact_and_the_old_one_stays(store: ArtifactStore, hub: LoopbackHub) -> None:
    old_commit = hub.push(REPO, model())
    old = download(store).artifact
    hub.push(REPO, model() | {"tokenizer.json": b"{}"})
    new = download(store)
    assert not new.cached
    assert new.reason == "identity.commit changed"
    assert download(store, revision=old_commit).artifact.key == old.key


def test_interrupted_file_continues_where_it_stopped(store: ArtifactStore, hub: LoopbackHub) -> None:
    hub.push(REPO, model())
    hub.break_after["model.safetensors"] = 300_000
    download(store)
    first, second = hub.gets("model.safetensors")
    assert first is None
    assert 0 < int(second.removeprefix("bytes=").rstrip("-")) <= 300_000


def test_server_without_ranges_starts_the_file_again(store: ArtifactStore, hub: LoopbackHub) -> None:
    files = model()
    hub.push(REPO, files)
    hub.ranges = False
    hub.break_after["model.safetensors"] = 300_000
    artifact = download(store).artifact
    assert (artifact.path / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_killed_download_continues_in_the_next_run(store: ArtifactStore, hub: LoopbackHub, tmp_path: Path) -> None:
    files = model(8 << 20)
    commit = hub.push(REPO, files)
    # The state that a killed run leaves: finished files, and a part of the next one.
    outcome = download(ArtifactStore(tmp_path / "other"))
    snapshot = store.work("download", outcome.artifact.key) / "snapshot"
    write(snapshot, {"config.json": files["config.json"], "model.safetensors.part": files["model.safetensors"][:5000]})
    hub.requests.clear()
    assert download(store).artifact.stats["commit"] == commit
    assert hub.gets("model.safetensors") == ["bytes=5000-"]
    assert hub.gets("config.json") == []


def test_run_killed_during_a_download_leaves_nothing_and_the_next_one_finishes(
    store: ArtifactStore, hub: LoopbackHub
) -> None:
    files = model(16 << 20)
    hub.push(REPO, files)
    hub.break_after["model.safetensors"] = 4 << 20
    script = (
        "from tests.tasks.test_download import *\n"
        "class Loud(Notes):\n"
        "    def progress(self, done, total, **metrics):\n"
        "        print(done, flush=True)\n"
        f"download(ArtifactStore({str(store.root)!r}), Loud())\n"
    )
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    with run.stdout:
        run.stdout.readline()
        run.send_signal(signal.SIGKILL)
    run.wait()
    assert store.ls() == []
    artifact = download(store).artifact
    assert (artifact.path / "model.safetensors").read_bytes() == files["model.safetensors"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_corrupted_transfer_is_refused(store: ArtifactStore, hub: LoopbackHub, name: str) -> None:
    hub.push(REPO, model())
    hub.corrupt = {name}
    with pytest.raises(ModelError, match=f"{name}: what arrives is not the file that the hub lists"):
        download(store)
    assert store.ls() == []
    hub.corrupt = set()
    assert len(download(store).artifact.record.files) == 4


def test_concurrent_callers_download_once(store: ArtifactStore, hub: LoopbackHub) -> None:
    hub.push(REPO, model(4 << 20))
    script = f"from tests.tasks.test_download import *; download(ArtifactStore({str(store.root)!r}))"
    runs = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(3)]
    assert [run.wait() for run in runs] == [0, 0, 0]
    assert len(hub.gets("model.safetensors")) == 1


def test_pickles_are_refused_unless_allowed(store: ArtifactStore, hub: LoopbackHub) -> None:
    files = model()
    files["pytorch_model.bin"] = files.pop("model.safetensors")
    hub.push(REPO, files)
    with pytest.raises(ModelError, match="allow_pickle"):
        download(store)
    assert hub.gets("pytorch_model.bin") == []
    assert (download(store, allow_pickle=True).artifact.path / "pytorch_model.bin").exists()


def test_safetensors_are_preferred_to_pickles(store: ArtifactStore, hub: LoopbackHub) -> None:
    hub.push(REPO, model() | {"pytorch_model.bin": b"pickle"})
    assert not (download(store, allow_pickle=True).artifact.path / "pytorch_model.bin").exists()


def test_python_files_come_only_with_trust(store: ArtifactStore, hub: LoopbackHub) -> None:
    hub.push(REPO, model() | {"modeling_tiny.py": b"pass"})
    assert not (download(store).artifact.path / "modeling_tiny.py").exists()
    assert (download(store, trust_remote_code=True).artifact.path / "modeling_tiny.py").exists()


def test_adapter_in_a_repository_is_not_downloaded(store: ArtifactStore, hub: LoopbackHub) -> None:
    hub.push(REPO, model() | {"adapter_config.json": b"{}", "adapter_model.safetensors": b""})
    assert not list(download(store).artifact.path.glob("adapter*"))


def test_full_disk_is_noticed_before_the_download(
    store: ArtifactStore, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(REPO, model())
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("tasks.store.shutil.disk_usage", lambda path: usage)
    with pytest.raises(StoreError, match=r"stage download needs .* are free"):
        download(store)
    assert hub.gets("model.safetensors") == []


def test_offline_run_uses_the_last_known_commit_with_a_warning(
    store: ArtifactStore, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.push(REPO, model())
    download(store)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notes = Notes()
    assert download(store, notes).cached
    assert f"using the last known commit of {REPO}, {commit[:12]}" in notes.lines[0]
    assert download(store, revision=commit).cached


def test_offline_run_of_an_unknown_model_says_so(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        ModelError, match=r"maker/tiny is no local directory, and the hub cannot be reached \(.*refused"
    ):
        download(store)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"name_or_path": "maker/unknown"}, "maker/unknown is no local directory, and .* has no such repository"),
        ({"revision": "v9"}, "model.revision: maker/tiny on .* has no revision 'v9'"),
        ({"name_or_path": "not a name"}, "neither a local directory nor a repository id"),
        ({"source": "modelscope", "name_or_path": "maker/unknown"}, "maker/unknown at main: ModelScope answers"),
    ],
)
def test_wrong_name_is_refused_on_one_line(
    store: ArtifactStore, hub: LoopbackHub, config: dict, complaint: str
) -> None:
    hub.push(REPO, model())
    with pytest.raises(ModelError, match=complaint) as caught:
        download(store, **config)
    assert "\n" not in str(caught.value)


def test_modelscope_model_is_pinned_by_the_content_that_is_listed(store: ArtifactStore, hub: LoopbackHub) -> None:
    hub.push(REPO, model(), revision="master")
    old = download(store, source="modelscope")
    assert (old.artifact.path / "config.json").read_bytes() == model()["config.json"]
    assert download(store, source="modelscope").cached
    hub.push(REPO, model() | {"tokenizer.json": b"{}"}, revision="master")
    assert download(store, source="modelscope").reason == "identity.commit changed"


def test_missing_package_is_named() -> None:
    with pytest.raises(ModelError, match="install mcaflow's extra `modelscope`"):
        import_modelscope("package_that_is_not_there")


def test_token_reaches_the_hub_and_no_file(
    store: ArtifactStore, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(REPO, model())
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.corrupt = {"config.json"}  # a failure keeps specs and logs
    with pytest.raises(ModelError):
        download(store)
    assert hub.tokens == {f"Bearer {TOKEN}"}
    texts = [path.read_bytes() for path in store.root.rglob("*") if path.is_file()]
    assert len(texts) > 3
    assert not any(TOKEN.encode() in text for text in texts)


def test_damaged_download_is_fetched_again(store: ArtifactStore, hub: LoopbackHub) -> None:
    hub.push(REPO, model())
    first = download(store).artifact
    path = first.path / "tokenizer.json"
    path.chmod(0o644)
    path.write_bytes(b'{"version": "1.1"}')
    second = download(store)
    assert not second.cached
    assert "tokenizer.json has other bytes" in second.reason
    assert second.artifact.digest == first.digest
    assert isinstance(probe(store, DownloadStage(ModelConfig(name_or_path=REPO))), Hit)


def test_last_answer_of_the_hub_that_is_damaged_is_not_used(
    store: ArtifactStore, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(REPO, model())
    download(store)
    (memory,) = (store.root / ".revisions").iterdir()
    assert json.loads(memory.read_bytes())["repo"] == REPO
    memory.write_text("{")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="the hub cannot be reached"):
        download(store)
