"""The scenarios of `tests/acceptance/ui.py` on PostgreSQL, as deployments/ has it: server, set-up and worker apart.

    python -m tests.acceptance.postgres --folder FOLDER

Makes a cluster of its own below FOLDER with Debian's `postgresql` (as root, for it runs as the user postgres), with a
password, on loopback alone. Prints what the database holds in the end. Ends with 1 when something goes wrong.
"""

import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.acceptance.harness import parser, show
from tests.ui.browser import missing
from tests.ui.play import AUTH, play, write_recipe
from tests.ui.service import apart

_PROGRAMS = ("initdb", "pg_ctl", "psql")
_FIGURES = {
    "version": "show server_version",
    "flow runs": "select count(*) from flow_run",
    "task runs": "select count(*) from task_run",
    "log lines": "select count(*) from log",
    "artifacts": "select count(*) from artifact",
    "events": "select count(*) from events",
    "size": "select pg_size_pretty(pg_database_size('prefect'))",
    "most connections allowed": "show max_connections",
    "connections": "select count(*) from pg_stat_activity where datname = 'prefect'",
    "deadlocks": "select deadlocks from pg_stat_database where datname = 'prefect'",
    "rolled back": "select xact_rollback from pg_stat_database where datname = 'prefect'",
}


@dataclass(frozen=True)
class Cluster:
    folder: Path
    port: int
    password: str

    @property
    def url(self) -> str:
        """What PREFECT_API_DATABASE_CONNECTION_URL takes."""
        return f"postgresql+asyncpg://prefect:{self.password}@127.0.0.1:{self.port}/prefect"

    def sql(self, statement: str, database: str = "prefect") -> str:
        """The answer, as text."""
        socket_folder = str(self.folder)
        options = ["-h", socket_folder, "-p", str(self.port), "-d", database, "-Atqc", statement]
        return _as_postgres(["psql", *options]).strip()


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A database `prefect`, owned by a user of that name with a password."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        made = Cluster(folder, probe.getsockname()[1], secrets.token_hex(16))
    folder.mkdir(parents=True)
    shutil.chown(folder, "postgres")
    data = str(folder / "data")
    _as_postgres(["initdb", "-D", data, "--auth-local=peer", "--auth-host=scram-sha-256"])
    options = f"-p {made.port} -k {folder} -c listen_addresses=127.0.0.1"
    _as_postgres(["pg_ctl", "-D", data, "-w", "-l", str(folder / "log"), "-o", options, "start"])
    try:
        made.sql(f"create role prefect login password '{made.password}'", "postgres")
        made.sql("create database prefect owner prefect", "postgres")
        yield made
    finally:
        _as_postgres(["pg_ctl", "-D", data, "-m", "fast", "stop"])


def _as_postgres(command: list[str]) -> str:
    program = _find(command[0])
    # pg_ctl leaves a server behind, which would keep a pipe open.
    with open("/dev/null") as nothing:
        argv = ["runuser", "-u", "postgres", "--", program, *command[1:]]
        capture = {} if command[0] == "pg_ctl" else {"capture_output": True}
        done = subprocess.run(argv, stdin=nothing, text=True, cwd="/", **capture)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr}")
    return done.stdout or ""


def _find(program: str) -> str | None:
    """Debian keeps the programs of each version in a folder of its own."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((str(folder / program) for folder in reversed(folders) if (folder / program).exists()), None)


def main(folder: Path) -> int:
    """Returns how many things went wrong."""
    absent = [name for name in _PROGRAMS if _find(name) is None]
    lacking = f"{', '.join(absent)} of Debian's postgresql" if absent else missing()
    if lacking:
        raise SystemExit(f"NOT RUN: needs {lacking}")
    folder.mkdir(parents=True, exist_ok=True)
    recipe = write_recipe(folder)
    with cluster(folder / "postgres") as database:
        env = AUTH | {"PREFECT_API_DATABASE_CONNECTION_URL": database.url}
        with apart(folder / "service", gpus=1, env=env) as service:
            wrong = play(service, recipe, "PostgreSQL")
            show("the database", ("", ""), [(name, database.sql(query)) for name, query in _FIGURES.items()])
        if list((folder / "service").rglob("prefect.db")):
            print("WRONG something was kept in SQLite")
            wrong += 1
        logs = [path for path in (folder / "service").glob("*.log") if database.password in path.read_text()]
        if logs:
            print(f"WRONG the database's password stands in {logs}")
            wrong += 1
    return wrong


if __name__ == "__main__":
    sys.exit(1 if main(parser(__doc__).parse_args().folder.absolute()) else 0)
