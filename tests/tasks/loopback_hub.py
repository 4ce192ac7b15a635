"""A model hub on the loopback interface that speaks as much of the Hugging Face Hub's protocol as a download needs.

It can break a connection in the middle of a file, forget how to serve ranges, and corrupt what it sends.
"""

import hashlib
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit

_TICK_SECONDS = 0.02


@dataclass
class LoopbackHub:
    """Repositories by name; each maps a revision to a commit, and a commit to its files."""

    revisions: dict[tuple[str, str], str] = field(default_factory=dict)
    commits: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    break_after: dict[str, int] = field(default_factory=dict)
    """File name -> bytes after which the connection breaks, once."""
    corrupt: set[str] = field(default_factory=set)
    ranges: bool = True
    bytes_per_second: float | None = None
    """How fast files are sent, each of them; None for as fast as possible."""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, Range header) of every request."""
    tokens: set[str | None] = field(default_factory=set)
    """Authorization headers that were seen."""
    endpoint: str = ""

    def push(self, repo: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Make `revision` point at a commit with these files; returns the commit."""
        content = json.dumps({name: hashlib.sha1(data).hexdigest() for name, data in sorted(files.items())})
        commit = hashlib.sha1(content.encode()).hexdigest()
        self.revisions[repo, revision] = commit
        self.commits[repo, commit] = files
        return commit

    def gets(self, name: str) -> list[str | None]:
        """Range headers of the GET requests for a file."""
        return [ranged for method, path, ranged in self.requests if method == "GET" and path.endswith("/" + name)]


@contextmanager
def serve():
    """A hub that answers while the block runs."""
    hub = LoopbackHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        query = dict(parse_qsl(urlsplit(self.path).query))
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        self.hub.tokens.add(self.headers.get("Authorization"))
        if path.startswith("/api/v1/models/"):
            self._modelscope(path.removeprefix("/api/v1/models/"), query)
        elif path.startswith("/api/models/"):
            self._info(path.removeprefix("/api/models/"))
        else:
            self._file(path.strip("/"))

    def _info(self, path: str) -> None:
        repo, _, revision = path.partition("/revision/")
        if not any(name == repo for name, _ in self.hub.revisions):
            self._error(404 if self.headers.get("Authorization") else 401, "RepoNotFound")
            return
        commit = self.hub.revisions.get((repo, revision), revision)
        files = self.hub.commits.get((repo, commit))
        if files is None:
            self._error(404, "RevisionNotFound")
            return
        siblings = [_listing(name, data) for name, data in files.items()]
        self._answer(200, json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode())

    def _file(self, path: str) -> None:
        repo, _, rest = path.partition("/resolve/")
        commit, _, name = rest.partition("/")
        data = self.hub.commits.get((repo, commit), {}).get(name)
        if data is None:
            self._error(404, "EntryNotFound")
            return
        if name in self.hub.corrupt:
            data = bytes([data[0] ^ 1]) + data[1:]
        asked, status = self.headers.get("Range"), 200
        if asked and self.hub.ranges:
            data, status = data[int(asked.removeprefix("bytes=").rstrip("-")) :], 206
        self._answer(status, data, breaks_after=self.hub.break_after.pop(name, None))

    def _modelscope(self, path: str, query: dict[str, str]) -> None:
        """ModelScope's protocol: a listing, and files by query."""
        repo, _, action = path.rpartition("/repo")
        files = self.hub.commits.get((repo, self.hub.revisions.get((repo, query["Revision"]), "")))
        if files is None:
            self._answer(404, json.dumps({"Code": 10010205001, "Success": False, "Message": "no repo"}).encode())
            return
        if not action:
            self._answer(200, files[query["FilePath"]])
            return
        listed = [
            {"Path": name, "Name": name, "Type": "blob", "Size": len(data), "Sha256": hashlib.sha256(data).hexdigest()}
            for name, data in files.items()
        ]
        self._answer(200, json.dumps({"Code": 200, "Success": True, "Data": {"Files": listed}}).encode())

    def _answer(self, status: int, body: bytes, breaks_after: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self._send(body[:breaks_after])
        if breaks_after is not None:
            self.wfile.flush()
            self.close_connection = True

    def _send(self, body: bytes) -> None:
        rate = self.hub.bytes_per_second
        piece = max(1, len(body) if rate is None else int(rate * _TICK_SECONDS))
        try:
            for start in range(0, len(body), piece):
                self.wfile.write(body[start : start + piece])
                if rate is not None:
                    time.sleep(_TICK_SECONDS)
        except ConnectionError:
            self.close_connection = True  # whoever asked was killed

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _listing(name: str, data: bytes) -> dict:
    """As the hub lists it: large files by SHA-256 (LFS), small ones by git's SHA-1."""
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    lfs = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 134}
    large = name.endswith((".safetensors", ".bin"))
    return {"rfilename": name, "size": len(data), "blobId": blob} | ({"lfs": lfs} if large else {})
