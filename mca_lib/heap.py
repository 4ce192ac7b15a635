"""How the ranks of a training get their memory on CPU: glibc keeps what they free, for the next step to use.

As it comes, glibc gives every freed block of more than 32 MiB back to the kernel, and a step frees and takes the same
logits and gradients again and again: each time the kernel hands out zeroed pages, one fault per 4 KiB. That was up to a
fifth of a step (docs/log.md, "Speed").
"""

import os
import platform
from collections.abc import Mapping

TUNABLES = {
    "glibc.malloc.mmap_max": 0,  # large blocks come from the heap, too
    "glibc.malloc.trim_threshold": 1 << 62,  # which never shrinks
    "glibc.malloc.arena_max": 1,  # one for all threads: other arenas are of 64 MiB
    # Small blocks that a thread's cache holds keep their neighbours apart: aligned blocks, as torch's all are, leave
    # such pieces in front, and without this the largest resident size grew by 66 % instead of 14 %.
    "glibc.malloc.tcache_count": 0,
}
"""glibc's names (manual, "Memory Allocation Tunables"); read once, when a process starts."""


def heap_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What to add to the environment of ranks that compute on CPU.

    Nothing without glibc, and nothing where the user has a setting of its own: `GLIBC_TUNABLES`, though it be empty, or
    glibc's older `MALLOC_...`.
    """
    chosen = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in environment)
    if chosen or platform.libc_ver()[0] != "glibc":
        return {}
    return {"GLIBC_TUNABLES": ":".join(f"{name}={value}" for name, value in TUNABLES.items())}
