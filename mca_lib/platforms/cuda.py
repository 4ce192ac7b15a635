"""NVIDIA devices: Megatron-Core's home, so there is nothing to answer for it."""

import os

import torch


def local_device() -> torch.device:
    """The device of this rank: LOCAL_RANK, counted within the devices that are visible to it."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def install(device: torch.device) -> None:
    """Make `device` the default of this process, as Megatron-Core expects."""
    torch.cuda.set_device(device)


def peak_memory_bytes() -> int:
    """Largest allocation of torch's caching allocator on the current device."""
    return torch.cuda.max_memory_allocated()
