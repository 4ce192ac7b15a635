"""A promoted model is brought to a directory or a hub, whole, and only while it has the name."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mca_lib.errors import ConfigError
from tasks.aliases import Aliases
from tasks.push import MARKER, push, push_problem
from tasks.stage import ensure
from tasks.store import Artifact, ArtifactStore
from tests.tasks.toys import Exported


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def promoted(store: ArtifactStore, text: str) -> Artifact:
    artifact = ensure(store, Exported(text)).artifact
    Aliases(store).promote("chat", artifact)
    return artifact


def bring(store: ArtifactStore, artifact: Artifact, target: object) -> bool:
    return push(store, "chat", "production", artifact, str(target), lambda: None)


def test_a_directory_is_replaced_by_the_holder_alone(store: ArtifactStore, tmp_path: Path) -> None:
    target = tmp_path / "served"
    first = promoted(store, "1")
    assert bring(store, first, target)
    assert {path.name for path in target.iterdir()} == {"config.json", "tokenizer.json", MARKER}
    made = target.stat().st_ino
    assert bring(store, first, target)
    assert target.stat().st_ino == made, "it had that already"
    second = promoted(store, "2")
    assert bring(store, second, target)
    assert not bring(store, first, target), "it lost the name"
    assert (target / "config.json").read_text() == "2"


def test_a_directory_with_something_else_is_left_alone(store: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("x")
    with pytest.raises(ConfigError, match="holds something that was not pushed there"):
        bring(store, promoted(store, "1"), tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter1.tex").exists()
    assert push_problem("hf://name") == "'hf://name': write hf://ORGANIZATION/NAME"
    assert push_problem("s3://bucket/x") is not None
    assert push_problem("hf://org/name") is None


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as an upload of small files needs."""

    files: dict[str, bytes]
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        listed = [{"type": "file", "path": n, "size": len(d), "oid": "0" * 40} for n, d in self.files.items()]
        siblings = [{"rfilename": name} for name in self.files]
        self._answer(listed if "/tree/" in self.path else {"id": "org/name", "sha": "0" * 40, "siblings": siblings})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != "Bearer hf_right":
            self._answer({"error": "no"}, 403)
        elif self.path.endswith("/repos/create"):
            self._answer({"url": f"http://{self.headers['Host']}/org/name"})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            self._answer(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]}
            )
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del self.files[line["value"]["path"]]
            self._answer(
                {
                    "success": True,
                    "commitOid": "1" * 40,
                    "commitUrl": f"http://{self.headers['Host']}/org/name/commit/{'1' * 40}",
                }
            )

    def _answer(self, content: object, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """Files of the one repository of a hub."""
    files = {"stale.txt": b"of an earlier model"}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Hub,), {"files": files}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    yield files
    server.shutdown()
    server.server_close()


def test_a_hub_gets_the_files_and_loses_what_was_there(
    store: ArtifactStore, hub: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = promoted(store, "1")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(
        ConfigError, match=r"promote\.push_to: org/name on http://127\.0\.0\.1:\d+ cannot be"
    ) as refusal:
        bring(store, artifact, "hf://org/name")
    assert "hf_wrong" not in str(refusal.value)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert bring(store, artifact, "hf://org/name")
    assert hub == {"config.json": b"1", "tokenizer.json": b""}
