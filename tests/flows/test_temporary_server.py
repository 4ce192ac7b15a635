"""The temporary server is started without Prefect, named in the environment, and waited for."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flows import temporary_server

ANSWERS = """
import http.server, sys

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): ...

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The program that is started in place of Prefect's server; gets the port."""
    program = [ANSWERS]
    monkeypatch.setenv("PREFECT_API_URL", "")  # put back at the end
    monkeypatch.setattr(temporary_server.atexit, "register", lambda call: call)

    def spawn(port: int) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-I", "-S", "-c", program[0], str(port)])

    monkeypatch.setattr(temporary_server, "_spawn", spawn)
    return program


def test_it_is_named_in_the_environment_and_has_its_port_alone(tmp_path: Path, spawned: list[str]):
    starting = temporary_server.start(tmp_path / "home")
    try:
        assert os.environ["PREFECT_API_URL"] == f"http://127.0.0.1:{starting.address[1]}/api"
        temporary_server.await_answer(starting)
        with pytest.raises(OSError, match="in use"):
            socket.create_server(starting.address)
    finally:
        starting.stop()
    assert starting.process.returncode is not None


def test_one_that_ends_is_not_waited_for(tmp_path: Path, spawned: list[str]):
    spawned[0] = "raise SystemExit(3)"
    starting = temporary_server.start(tmp_path / "home")
    with pytest.raises(RuntimeError, match="ended with 3"):
        temporary_server.await_answer(starting)
    starting.stop()


def test_a_run_with_a_server_elsewhere_does_not_import_one(tmp_path: Path):
    loaded = (
        "import sys, flows.pipeline, flows.server; print([m for m in sys.modules if m.startswith('prefect.server')])"
    )
    env = os.environ | {"PREFECT_API_URL": "http://127.0.0.1:1/api", "PREFECT_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", loaded], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
