"""With authentication on, who gets in without credentials: every route of the server is asked.

    python -m tests.acceptance.security [FOLDER]

Starts a server of its own as `mcaflow server start` does, reads its routes from openapi.json, and asks each with every
method, with a good CSRF token: without credentials, and with wrong ones. All but the two health checks must answer 401.
Then: the right credentials get in, a POST without a CSRF token does not, websockets close, and the password stands in
no setting that the API shows and in no line of the server's log. Pages outside the API that need no credentials are
listed. About a minute.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import websockets.sync.client
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.ports import free_port

PASSWORD = "correct-horse-battery-staple"
RIGHT, WRONG = ("ops", PASSWORD), ("ops", "guess")
HEALTH = {"/api/health", "/api/ready"}
SOCKETS = ("/api/events/in", "/api/events/out", "/api/logs/out")


def main(folder: Path) -> int:
    """Run the check; returns the number of things that are wrong."""
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    log = folder / "server.log"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    env |= {"PREFECT_HOME": str(folder / "home"), "PREFECT_SERVER_API_AUTH_STRING": f"ops:{PASSWORD}"}
    command = [sys.executable, "-m", "flows.cli", "server", "start", "--port", str(port)]
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
    try:
        _wait(base, server)
        problems = [*_routes(base), *_sockets(base), *_credentials(base)]
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)
    if PASSWORD in log.read_text(errors="replace"):
        problems.append("the password stands in the server's log")
    for problem in problems:
        print(f"WRONG {problem}")
    print(f"{len(problems)} wrong")
    return len(problems)


def _routes(base: str) -> list[str]:
    schema = httpx.get(f"{base}/openapi.json", timeout=60).json()
    problems, asked = [], 0
    with httpx.Client(base_url=base, timeout=60, headers=_csrf(base)) as client:
        for relative, methods in schema["paths"].items():
            path = f"/api{relative}"
            url = path.replace("{", "").replace("}", "")
            for method in methods:
                for auth in (None, WRONG):
                    status = client.request(method.upper(), url, auth=auth, json={}).status_code
                    asked += 1
                    if status != (200 if path in HEALTH else 401):
                        problems.append(f"{method.upper()} {path} {'without' if auth is None else 'wrong'}: {status}")
        print(f"{len(schema['paths'])} paths, {asked} requests; open: {', '.join(sorted(HEALTH))}")
        outside = ["/", "/docs", "/redoc", "/openapi.json", "/ui-settings", "/api/docs", "/api/openapi.json"]
        found = [path for path in outside if client.get(path).status_code == 200]
        print(f"outside the API, without credentials (close them in the proxy): {', '.join(found)}")
        problems += [f"{path} is open" for path in found if path.startswith("/api/")]
    return problems


def _sockets(base: str) -> list[str]:
    problems = []
    for path in SOCKETS:
        try:
            with websockets.sync.client.connect(
                f"{base.replace('http', 'ws')}{path}", subprotocols=["prefect"]
            ) as socket:
                socket.send(json.dumps({"type": "auth", "token": "guess"}))
                answer = socket.recv(timeout=30)
                problems.append(f"websocket {path} answered {answer!r}")
        except (ConnectionClosed, InvalidStatus):
            print(f"websocket {path}: closed")
    return problems


def _credentials(base: str) -> list[str]:
    problems = []
    with httpx.Client(base_url=base, timeout=60, auth=RIGHT) as client:
        settings = client.get("/api/admin/settings")
        if settings.status_code != 200:
            problems.append(f"the right credentials: {settings.status_code}")
        if PASSWORD in settings.text:
            problems.append("the API shows the password among its settings")
        status = client.post("/api/flows/filter", json={}).status_code
        if status != 403:
            problems.append(f"POST without a CSRF token: {status}")
        status = client.post("/api/flows/filter", json={}, headers=_csrf(base)).status_code
        if status != 200:
            problems.append(f"POST with a CSRF token: {status}")
        stranger = client.get("/api/flows/count", headers={"Origin": "https://evil.example"})
        if "access-control-allow-origin" in stranger.headers:
            problems.append("another site may read answers")
    print("right credentials get in; a POST needs a CSRF token; other sites read nothing")
    return problems


def _csrf(base: str) -> dict[str, str]:
    """Headers with a good token, which only the right credentials get."""
    answer = httpx.get(f"{base}/api/csrf-token", params={"client": "check"}, auth=RIGHT, timeout=60)
    return {"Prefect-Csrf-Token": answer.json()["token"], "Prefect-Csrf-Client": "check"}


def _wait(base: str, server: subprocess.Popen) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"{base}/api/ready", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    folder = parser.parse_args().folder or Path(tempfile.mkdtemp(prefix="mcaflow-security-"))
    folder.mkdir(parents=True, exist_ok=True)
    sys.exit(1 if main(folder.absolute()) else 0)
