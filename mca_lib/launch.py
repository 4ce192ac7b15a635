"""torchrun on one machine, reachable from that machine alone: ``python -m mca_lib.launch TORCHRUN-ARGUMENTS``.

torchrun's stores listen on every interface, whatever the rendezvous endpoint says (torch 2.15), and whoever reaches
them can write into them. Here they are handed a socket that is bound to the loopback interface.
"""

import socket
from typing import Any

import torch.distributed
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

LOOPBACK = "127.0.0.1"


class LoopbackStore(TCPStore):
    """A TCPStore whose server, if this process runs it, listens on the loopback interface."""

    def __init__(
        self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, **options: Any
    ) -> None:
        if is_master:
            with socket.create_server((LOOPBACK, port)) as listener:
                host_name, port = LOOPBACK, listener.getsockname()[1]
                options["master_listen_fd"] = listener.detach()
        super().__init__(host_name, port, world_size, is_master, **options)


def main() -> None:
    """Run torchrun with the arguments of this process."""
    # The two names by which torchrun's rendezvous knows the class.
    c10d_rendezvous_backend.TCPStore = LoopbackStore
    torch.distributed.TCPStore = LoopbackStore
    from torch.distributed.run import main as torchrun

    torchrun()


if __name__ == "__main__":
    main()
