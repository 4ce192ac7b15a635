"""Ports of tests: not of the kernel's range, not twice, and not taken."""

import os
import socket

from tests import ports


def test_a_port_is_given_once_also_to_processes_that_ask_in_the_same_order(monkeypatch):
    first, second = ports.free_port(), ports.free_port()
    assert ports.FIRST <= min(first, second) <= max(first, second) < ports._ephemeral()
    with socket.create_server(("127.0.0.1", second)):
        monkeypatch.setattr(ports, "_candidates", lambda: iter((first, second, *range(second + 1, second + 99))))
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(write, str(ports.free_port()).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        third = int(os.read(read, 9))
    assert third > second


def test_a_port_that_is_bound_is_passed_over(monkeypatch):
    with socket.create_server(("127.0.0.1", ports.free_port())) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "_lock", lambda _: True)
        monkeypatch.setattr(ports, "_candidates", lambda: iter((port, port + 1)))
        assert ports.free_port() == port + 1
