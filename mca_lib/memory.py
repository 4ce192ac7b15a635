"""How much memory a process may still take: the machine's, or what its container leaves."""

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes: the least of what the machine has available and what is left of the limits of this process's cgroups."""
    return min([psutil.virtual_memory().available, *_left_in_cgroups()])


def _left_in_cgroups(root: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Bytes left under each limit, of the process's own group and of those above it (cgroup v2 and v1)."""
    for line in membership.read_text().splitlines() if membership.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _up(root, root / path.lstrip("/"), "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _up(top, top / path.lstrip("/"), *names)


def _up(top: Path, folder: Path, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """Pages of files that nobody has used lately count as used and are given up first: they are available."""
    for group in (folder, *folder.parents):
        bound, used = _number(group / limit), _number(group / usage)
        if bound is not None and used is not None:
            yield max(0, bound - used + _statistic(group / "memory.stat", reclaimable))
        if group == top:
            return


def _number(path: Path) -> int | None:
    """None: there is no such file, or it says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[0] == name), 0)
    except OSError:
        return 0
