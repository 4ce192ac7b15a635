"""Ports for servers of tests, which a test must know before the server listens.

A port that the kernel picks (`bind` to 0) is of its ephemeral range: once freed, any outgoing connection or any other
server that lets the kernel pick may have it before its server comes. These are below that range, so that only who names
such a port takes it, and are handed out once on a machine: a lock file per port is held while the process lives.
"""

import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

FIRST = 20000
"""Below are the ports that services are known by, Prefect's 4200 and its tests' 8000 to 9000 among them."""

_held: list[int] = []


def free_port() -> int:
    """A TCP port that nothing is bound to, on any address, and that no other process is given while this one lives.

    Raises:
        RuntimeError: there is none.
    """
    for port in _candidates():
        if _lock(port) and _is_free(port):
            return port
    raise RuntimeError(f"no port from {FIRST} to {_ephemeral() - 1} is free")


def _candidates() -> Iterator[int]:
    ports = list(range(FIRST, _ephemeral()))
    random.Random(os.getpid()).shuffle(ports)
    yield from ports


def _ephemeral() -> int:
    """The first port that the kernel gives to those who do not name one; 49152 (RFC 6335) where it does not say."""
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    return int(path.read_text().split()[0]) if path.exists() else 49152


def _lock(port: int) -> bool:
    """Whether this process, and not another, may have the port from now on. A file's lock ends with its process."""
    folder = Path(tempfile.gettempdir()) / f"mcaflow-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    held = os.open(folder / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        return False
    _held.append(held)
    return True


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("", port)):
            return True
    except OSError:
        return False
