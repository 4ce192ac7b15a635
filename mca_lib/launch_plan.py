"""What torchrun is to start on each machine of a training; a file that all machines can read, without torch."""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class LaunchPlan:
    """`python -m MODULE ARGUMENTS` in `nproc_per_node` ranks on each of `nnodes` machines.

    env        added to the environment of the ranks
    logs       folder of the machines' logs, `<log_name>...log`; on a file system that all of them see
    """

    module: str
    arguments: str
    logs: str
    log_name: str
    nproc_per_node: int = 1
    nnodes: int = 1
    max_restarts: int = 0
    env: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @property
    def on_this_machine(self) -> list[str]:
        """The command where all ranks are here: a free port, on the loopback interface."""
        return self._torchrun("--nnodes=1", f"--rdzv-endpoint={LOOPBACK}:0", f"--local-addr={LOOPBACK}")

    def on_one_of_many(self, endpoint: str, run_id: str, address: str) -> list[str]:
        """The command on one machine. `endpoint` is of a store that runs already, `address` is this machine's own."""
        return self._torchrun(
            f"--nnodes={self.nnodes}",
            f"--rdzv-endpoint={endpoint}",
            f"--rdzv-id={run_id}",
            "--rdzv-conf=is_host=0",
            f"--local-addr={address}",
        )

    def log_of(self, machine: str) -> Path:
        """Log of one machine among several."""
        return Path(self.logs) / f"{self.log_name}.{machine}.log"

    def _torchrun(self, *rendezvous: str) -> list[str]:
        return [
            *(sys.executable, "-m", "mca_lib.launch", "--rdzv-backend=c10d", *rendezvous),
            f"--nproc-per-node={self.nproc_per_node}",
            f"--max-restarts={self.max_restarts}",
            *("-m", self.module, self.arguments),
        ]


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """`host:port`. Raises ValueError."""
    address, _, port = endpoint.rpartition(":")
    if not address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{endpoint!r} is not host:port")
    return address, int(port)
