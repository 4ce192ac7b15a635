"""The process behind `mca_lib.ranks.RankPool`: imports everything heavy once, forks ranks, and collects what they say.

Started by the pool as ``python -m mca_lib.rank_server FD PARENT``: the socket's descriptor, the caller's process id.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import pickle
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import IO, Any

from mca_lib.rank_process import PR_SET_PDEATHSIG, as_user_error
from mca_lib.ranks import Call, Failure

GRACE_AFTER_FAILURE = 1.0
"""Seconds in which the other ranks may still report: the first failure is not always the first to be read."""


def serve(connection: Connection, parent: int) -> None:
    """Answer calls until the other end closes. An interrupt from the terminal is the caller's to act on."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _preload()
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        connection.send(_run(call))


def _preload() -> None:
    """Everything heavy that ranks use, imported once. No process group, no thread pool."""
    from mca_lib.platforms import install

    install()
    import megatron.core.dist_checkpointing
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401
    import torch
    import transformers

    import mca_lib.launch
    import mca_lib.models.gpt
    import mca_lib.models.hybrid.model  # noqa: F401
    from mca_lib.models.registry import FAMILIES

    # transformers imports what is named, and when it is named.
    for name in ("AutoModelForCausalLM", "TrainingArguments", *(f.architecture for f in FAMILIES.values())):
        getattr(transformers, name, None)  # an export of a hybrid has code of its own
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # keeps the ranks from copying pages only to collect them


def _run(call: Call) -> tuple[bool, Any]:
    """Fork the ranks and collect (True, values by rank) or (False, Failure)."""
    ports = os.pipe()
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(call.world_size)]
        return _fork(call, ports, logs)


def _fork(call: Call, ports: tuple[int, int], logs: list[IO[str]]) -> tuple[bool, Any]:
    pids, pipes, server = [], [], os.getpid()
    for rank in range(call.world_size):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _die_with(server)
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
    return False, _failure(call, reports, late, logs, statuses)


def _failure(
    call: Call, reports: dict[int, tuple[bool, bytes]], late: bool, logs: list[IO[str]], statuses: list[int]
) -> Failure:
    """All that is known, and the first of it in one line."""
    what = f"{call.qualname} on {call.world_size} ranks " + (f"exceeded {call.timeout:.0f} s" if late else "failed")
    failed = [(rank, json.loads(raw)) for rank, (ok, raw) in reports.items() if not ok]  # in the order of arrival
    parts = [what, *(f"--- rank {rank} ---\n{report['traceback']}" for rank, report in failed)]
    for rank, log in enumerate(logs):
        log.seek(0)
        text = log.read()[-4000:]
        if text or rank not in reports:
            parts.append(f"--- rank {rank}, exit {statuses[rank]}, output ---\n{text}")
    message = "\n".join(parts)
    # A rank that lost its neighbour reports too, and not always after it: what a user can mend goes first.
    for rank, report in sorted(failed, key=lambda pair: not pair[1]["user"]):
        summary = f"rank {rank} of {call.world_size}: {report['type']}: {report['message'].splitlines()[0]:.300}"
        return Failure(message, summary, (report["type"], report["message"]) if report["user"] else None)
    ended = next((f"rank {r} of {call.world_size} ended with status {s}" for r, s in enumerate(statuses) if s), what)
    return Failure(message, what if late else ended)


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
    except BaseException as error:
        report = b"0" + json.dumps(_described(error)).encode()
    with os.fdopen(write, "wb") as pipe:
        pipe.write(report)
    sys.stdout.flush()
    return 0 if report[:1] == b"1" else 1


def _described(error: BaseException) -> dict[str, Any]:
    user = as_user_error(error)
    return {
        "type": type(user or error).__name__,
        "message": str(user or error) or "no message",
        "user": user is not None,
        "traceback": traceback.format_exc(),
    }


def _join(rank: int, world_size: int, ports: tuple[int, int]) -> None:
    """The default process group. Rank 0 listens on a free port of the kernel's choice and tells the others."""
    import torch.distributed as dist

    from mca_lib.launch import NarrowStore

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if rank == 0:
        store = NarrowStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        os.write(ports[1], f"{store.port:06d}".encode() * (world_size - 1))
    else:
        store = dist.TCPStore("127.0.0.1", int(os.read(ports[0], 6)), world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()  # rank 0 has the store: were it to end first, those that still join would lose their connection


def _load(call: Call) -> Callable[..., Any]:
    module = importlib.import_module(call.module) if call.file is None else sys.modules.get(call.module)
    if module is None:
        spec = importlib.util.spec_from_file_location(call.module, call.file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[call.module] = module
        spec.loader.exec_module(module)
    for name in call.qualname.split("."):
        module = getattr(module, name)
    return module


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, in whatever way. Linux only."""
    ctypes.CDLL("libc.so.6").prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)  # it ended before the kernel knew that we wanted to be told


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
    os._exit(0)  # without the interpreter's farewell: native libraries report their leaks there
