"""Where tensors live and how ranks talk: one frozen `Platform`, chosen once per process.

`install()` makes Megatron-Core usable on this machine. With an accelerator there is nothing to do; without one, the
table of `mca_lib.platforms.cpu` answers the calls that Megatron makes to `torch.cuda`. Call it before anything of
`megatron` is built; calling it again does nothing.
"""

import functools
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Platform:
    """The device of this rank and the collective backend that goes with it."""

    device_type: str
    backend: str
    device: "torch.device"

    def peak_memory_bytes(self) -> int:
        """Largest memory that this rank has held: device memory where there is one, else resident memory."""
        if self.device_type == "cuda":
            from mca_lib.platforms import cuda

            return cuda.peak_memory_bytes()
        from mca_lib.platforms import cpu

        return cpu.peak_memory_bytes()


@functools.cache
def current_platform() -> Platform:
    """`cuda` where torch sees a device, else `cpu`; the device index is the rank's LOCAL_RANK."""
    import torch

    if torch.cuda.is_available():
        from mca_lib.platforms import cuda

        return Platform("cuda", "nccl", cuda.local_device())
    return Platform("cpu", "gloo", torch.device("cpu"))


def install() -> Platform:
    """Prepare this process for Megatron-Core and return the platform; idempotent."""
    platform = current_platform()
    if platform.device_type == "cuda":
        from mca_lib.platforms import cuda

        cuda.install(platform.device)
    else:
        from mca_lib.platforms import cpu

        cpu.install()
    return platform


def uses_transformer_engine() -> bool:
    """Is there a GPU, and Transformer Engine to drive it?"""
    return current_platform().device_type == "cuda" and importlib.util.find_spec("transformer_engine") is not None
