"""A pool of forked ranks: many distributed calls at the price of a fork each, not of an import.

    caller ──socket──> server (torch, megatron, transformers imported once) ──fork──> rank 0 … rank n-1

The server (`mca_lib.rank_server`) stays single-threaded and never opens a process group, so forking it is safe. Each
call forks fresh ranks: nothing leaks from one call into the next, and all of their memory is given back. A failing
rank's traceback is raised in the caller; a call that exceeds its time is killed, with the stacks of all ranks. Ranks
die with the server, the server with its caller, however that ends.

Arguments and values are pickled: they pass between a process and its own children, over pipes that nobody else has.
"""

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from mca_lib import errors

ROOT = Path(__file__).resolve().parents[1]


class RankError(Exception):
    """A rank raised, died, or ran out of time; the message holds its traceback and output.

    Attributes:
        summary: what went wrong first, in one line.
        user_error: the error that came first, where it is one that a user can mend.
    """

    def __init__(self, message: str, summary: str = "", user_error: errors.UserError | None = None) -> None:
        super().__init__(message)
        self.summary = summary or message.splitlines()[0]
        self.user_error = user_error


@dataclass(frozen=True)
class Failure:
    """What the server tells of a call that did not succeed."""

    message: str
    summary: str
    user_error: tuple[str, str] | None = None
    """Class name and message of the first rank's error, where a user can mend it."""

    def error(self) -> RankError:
        user = None
        if self.user_error is not None:
            name, text = self.user_error
            user = getattr(errors, name, errors.UserError)(text)
        return RankError(self.message, self.summary, user)


@dataclass(frozen=True)
class Call:
    """What every rank runs. The function goes by name, so that the server imports no module of the caller's."""

    world_size: int
    module: str
    file: str | None
    """Where the module is, for one that may not be found by its name."""
    qualname: str
    args: bytes
    timeout: float
    path: list[str]


class RankPool:
    """Starts the server on the first call and stops it in `close`; a context manager.

    Args:
        env: added to the environment of the server and its ranks.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = dict(env or {})
        self._server: subprocess.Popen | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run_ranks(self, world_size: int, fn: Callable[..., Any] | str, *args: Any, timeout: float = 120.0) -> list[Any]:
        """Run the module-level function `fn(*args)` in `world_size` ranks; returns each rank's value, by rank.

        `fn` may be given as `module:name`, and is then imported by the ranks alone.
        RANK, WORLD_SIZE and the default gloo process group are there when `fn` starts.
        """
        if isinstance(fn, str):
            (module, _, name), file = fn.partition(":"), None
        else:
            module, name, file = fn.__module__, fn.__qualname__, sys.modules[fn.__module__].__file__
        call = Call(world_size, module, file, name, pickle.dumps(args), timeout, list(sys.path))
        connection = self._connect()
        connection.send(call)
        if not connection.poll(timeout + 120):
            self.close()
            raise RankError(f"the rank server did not answer within {timeout + 120:.0f} s")
        ok, payload = connection.recv()
        if not ok:
            raise payload.error()
        return [pickle.loads(value) for value in payload]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._server is not None:
            try:
                self._server.wait(1)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server = None

    def _connect(self) -> Connection:
        if self._connection is None:
            ours, theirs = socket.socketpair()
            passive = {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that wait would spin, on the cores of the other ranks
            env = {
                **passive,
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "TOKENIZERS_PARALLELISM": "false",
                **self._env,
            }
            env.pop("PYTHONDONTWRITEBYTECODE", None)
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", "mca_lib.rank_server", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env=env,
                stdin=subprocess.DEVNULL,
            )
            theirs.close()
            self._connection = Connection(ours.detach())
        return self._connection
