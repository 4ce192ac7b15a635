"""torchrun that listens where it is told to and nowhere else: ``python -m mca_lib.launch TORCHRUN-ARGUMENTS``.

torchrun's stores listen on every interface, whatever the rendezvous endpoint and the local address say (torch 2.15),
and whoever reaches them can write into them. Here they are handed a socket that is bound to that address: 127.0.0.1 on
one machine. Ranks that compute on CPU get the memory settings of `mca_lib.heap`.

Exit status: that of torchrun; 2, and one line in place of a traceback, where a rank met a mistake of the user. Whoever
sets MCAFLOW_RANK_ERRORS finds the reasons there and tells them itself.
"""

import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend
from torch.distributed.launcher import api as launcher

from mca_lib.heap import heap_settings
from mca_lib.rank_process import ERRORS_VARIABLE, first_failure
from mca_lib.restarts import RestartingAgent


class NarrowStore(TCPStore):
    """A TCPStore whose server, if this process runs it, listens on the address of `host_name` alone."""

    def __init__(
        self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, **options: Any
    ) -> None:
        if is_master:
            with socket.create_server((_address(host_name), port)) as listener:
                host_name, port = listener.getsockname()[:2]
                options["master_listen_fd"] = listener.detach()
        super().__init__(host_name, port, world_size, is_master, **options)


def main() -> None:
    """Run torchrun with the arguments of this process."""
    # The two names by which torchrun's rendezvous knows the class.
    c10d_rendezvous_backend.TCPStore = NarrowStore
    torch.distributed.TCPStore = NarrowStore
    # Slurm sends a signal to every process of a job, and our supervisor passes it on too. torchrun (2.15) raises at
    # each: a second one would end it while its ranks are writing their checkpoint, and they die with it.
    api._terminate_process_handler = _once(api._terminate_process_handler)
    launcher.LocalElasticAgent = RestartingAgent
    if not torch.cuda.is_available():
        os.environ.update(heap_settings())  # the ranks inherit it
    from torch.distributed.run import main as torchrun

    with _reasons_told():
        torchrun()


@contextlib.contextmanager
def _reasons_told() -> Iterator[None]:
    """End with exit status 2 and the user's mistake where that ended a rank, unless somebody else reads the reasons."""
    if ERRORS_VARIABLE in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mcaflow-ranks-") as folder:
        os.environ[ERRORS_VARIABLE] = folder
        try:
            yield
        except ChildFailedError:
            failure = first_failure(Path(folder))
            if failure is None or failure["kind"] != "user":
                raise
            print(f"error: {failure['message']}", file=sys.stderr)
            sys.exit(2)


def _address(host_name: str) -> str:
    """torchrun's own default for one machine is the name `localhost`, which is to mean IPv4."""
    return "127.0.0.1" if host_name == "localhost" else host_name


def _once(handler: Callable[[int, FrameType | None], None]) -> Callable[[int, FrameType | None], None]:
    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        handler(number, frame)

    return first


if __name__ == "__main__":
    main()
