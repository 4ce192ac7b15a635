"""A session-lived pool of forked ranks: distributed tests at the price of a fork, not of an import.

    pytest ──socket──> server (torch, megatron, transformers imported once) ──fork──> rank 0 … rank n-1

The server stays single-threaded and never opens a process group, so forking it is safe. Each call forks fresh ranks:
nothing leaks from one test into the next. A failing rank's traceback is raised in the test; a call that exceeds its
time is killed, with the stacks of all ranks. Ranks die with the server, the server with pytest.
"""

import contextlib
import ctypes
import faulthandler
import importlib.util
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
PR_SET_PDEATHSIG = 1
GRACE_AFTER_FAILURE = 1.0
"""Seconds in which the other ranks may still report: the first failure is not always the first to be read."""


class RankError(AssertionError):
    """A rank raised, died, or ran out of time; the message holds its traceback and output."""


@dataclass(frozen=True)
class Call:
    """What every rank runs. The function goes by file and name, so that the server imports no test module."""

    world_size: int
    module: str
    file: str
    qualname: str
    args: bytes
    timeout: float
    path: list[str]


class RankPool:
    """Starts the server on the first call and stops it in `close`."""

    def __init__(self) -> None:
        self._server: subprocess.Popen | None = None
        self._connection: Connection | None = None

    def run_ranks(self, world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Run the module-level function `fn(*args)` in `world_size` ranks; returns each rank's value, by rank.

        RANK, WORLD_SIZE and the default gloo process group are there when `fn` starts.
        """
        module = sys.modules[fn.__module__]
        call = Call(
            world_size, fn.__module__, module.__file__, fn.__qualname__, pickle.dumps(args), timeout, list(sys.path)
        )
        connection = self._connect()
        connection.send(call)
        if not connection.poll(timeout + 120):
            self.close()
            raise RankError(f"the rank server did not answer within {timeout + 120:.0f} s")
        ok, payload = connection.recv()
        if not ok:
            raise RankError(payload)
        return [pickle.loads(value) for value in payload]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._server is not None:
            try:
                self._server.wait(10)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server = None

    def _connect(self) -> Connection:
        if self._connection is None:
            ours, theirs = socket.socketpair()
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
            env.pop("PYTHONDONTWRITEBYTECODE", None)
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=env
            )
            theirs.close()
            self._connection = Connection(ours.detach())
        return self._connection


def serve(connection: Connection) -> None:
    """Answer calls until the other end closes."""
    _die_with_parent()
    _preload()
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        connection.send(_run(call))


def _preload() -> None:
    """Everything heavy that ranks use, imported once. No process group, no thread pool."""
    import gc

    from mca_lib.platforms import install

    install()
    import megatron.core.dist_checkpointing
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, TrainingArguments  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    import mca_lib.launch  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # keeps the ranks from copying pages only to collect them


def _run(call: Call) -> tuple[bool, Any]:
    """Fork the ranks and collect (True, values by rank) or (False, message)."""
    ports = os.pipe()
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(call.world_size)]
        return _fork(call, ports, logs)


def _fork(call: Call, ports: tuple[int, int], logs: list[IO[str]]) -> tuple[bool, Any]:
    pids, pipes = [], []
    for rank in range(call.world_size):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = _rank_main(call, rank, ports, write, logs[rank])
            finally:
                os._exit(status)
        os.close(write)
        pids.append(pid)
        pipes.append(read)
    try:
        reports, late = _collect(pipes, pids, call.timeout)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        for fd in ports:
            os.close(fd)
    if not late and all(reports.get(rank, (False,))[0] for rank in range(call.world_size)):
        return True, [reports[rank][1] for rank in range(call.world_size)]
    parts = [f"{call.qualname} on {call.world_size} ranks " + (f"exceeded {call.timeout:.0f} s" if late else "failed")]
    for rank, report in reports.items():  # in the order in which they came
        if not report[0]:
            parts.append(f"--- rank {rank} ---\n{report[1].decode()}")
    for rank, log in enumerate(logs):
        log.seek(0)
        text = log.read()[-4000:]
        if text or rank not in reports:
            parts.append(f"--- rank {rank}, exit {statuses[rank]}, output ---\n{text}")
    return False, "\n".join(parts)


def _collect(pipes: list[int], pids: list[int], timeout: float) -> tuple[dict[int, tuple[bool, bytes]], bool]:
    """Read every rank's report; stop early after a failure, and dump all stacks when the time is up."""
    reports: dict[int, tuple[bool, bytes]] = {}
    buffers: dict[int, bytes] = dict.fromkeys(range(len(pipes)), b"")
    deadline, failed = time.monotonic() + timeout, False
    with selectors.DefaultSelector() as selector:
        for rank, fd in enumerate(pipes):
            selector.register(fd, selectors.EVENT_READ, rank)
        while selector.get_map():
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                break
            for key, _ in events:
                chunk = os.read(key.fd, 1 << 20)
                if chunk:
                    buffers[key.data] += chunk
                    continue
                selector.unregister(key.fd)
                os.close(key.fd)
                raw = buffers[key.data]
                if raw:
                    reports[key.data] = (raw[:1] == b"1", raw[1:])
                if raw[:1] != b"1" and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE)
        left = [key.fd for key in selector.get_map().values()]
        late = bool(left) and not failed
        if late:
            for pid in pids:
                os.kill(pid, signal.SIGUSR1)
            time.sleep(0.5)  # for faulthandler to write
        for fd in left:
            os.close(fd)
    return reports, late


def _rank_main(call: Call, rank: int, ports: tuple[int, int], write: int, log: IO[str]) -> int:
    """The life of one rank: process group, function, report. Returns the exit status."""
    _die_with_parent()
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    try:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(call.world_size), LOCAL_WORLD_SIZE=str(call.world_size)
        )
        sys.path[:] = call.path
        _join(rank, call.world_size, ports)
        value = _load(call)(*pickle.loads(call.args))
        report = b"1" + pickle.dumps(value)
    except BaseException:
        report = b"0" + traceback.format_exc().encode()
    with os.fdopen(write, "wb") as pipe:
        pipe.write(report)
    sys.stdout.flush()
    return 0 if report[:1] == b"1" else 1


def _join(rank: int, world_size: int, ports: tuple[int, int]) -> None:
    """The default process group. Rank 0 listens on a free port of the kernel's choice and tells the others."""
    import torch.distributed as dist

    from mca_lib.launch import LoopbackStore

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if rank == 0:
        store = LoopbackStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        os.write(ports[1], f"{store.port:06d}".encode() * (world_size - 1))
    else:
        store = dist.TCPStore("127.0.0.1", int(os.read(ports[0], 6)), world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def _load(call: Call) -> Callable[..., Any]:
    module = sys.modules.get(call.module)
    if module is None:
        spec = importlib.util.spec_from_file_location(call.module, call.file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[call.module] = module
        spec.loader.exec_module(module)
    for name in call.qualname.split("."):
        module = getattr(module, name)
    return module


def _die_with_parent() -> None:
    ctypes.CDLL("libc.so.6").prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    # Calls arrive as instances of `ranks.Call`, by the name under which pytest knows this module.
    sys.path.insert(0, str(ROOT))
    from tests import ranks

    ranks.serve(Connection(int(sys.argv[1])))
    os._exit(0)  # without the interpreter's farewell: native libraries report their leaks there
