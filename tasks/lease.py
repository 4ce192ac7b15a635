"""A lease on one stage key, so that two runs compute it once.

    .leases/<stage>-<key>.<N>      JSON of the owner; its mtime is the heartbeat

The holder is whoever created the highest N. Creation is atomic (a hard link onto a name that must not exist), and a
takeover is the creation of N+1, so that two takers cannot both win. A holder is gone when its heartbeat stands still
for `STALE_SECONDS` of the *observer's* clock (clocks of two hosts are never compared), or at once when it lived on this
host and its process is dead (pid and start time). A holder that was only asleep finds a higher number, or its
own file gone, and gets LeaseLost.

Correctness never depends on this (some shared file systems lie about links): see `tasks/store.py`.
"""

import errno
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.cancel import Scope
from tasks.errors import LeaseLost

HEARTBEAT_SECONDS = 5.0
# Longer than the minute for which NFS may show an old time stamp.
STALE_SECONDS = 90.0
POLL_SECONDS = (0.2, 2.0)
REPORT_SECONDS = 30.0


@dataclass(frozen=True)
class Owner:
    """Who holds a lease. `boot` and `namespace` tell whether `pid` means anything to the reader."""

    host: str
    boot: str
    namespace: str
    pid: int
    started: int
    """Clock ticks from boot to the start of the process: unlike a time of day, it never changes."""
    uuid: str

    @staticmethod
    def me() -> "Owner":
        pid = os.getpid()
        _, started = _process(pid) or ("", 0)
        return Owner(socket.gethostname(), _boot_id(), _pid_namespace(), pid, started, uuid.uuid4().hex)

    def is_here(self) -> bool:
        """True when the owner ran on this machine since it was last started, where its process can be looked at."""
        return (self.host, self.boot, self.namespace) == (socket.gethostname(), _boot_id(), _pid_namespace())

    def is_dead(self) -> bool:
        """True when the owner ran on this machine and its process is gone; False when that cannot be known."""
        if not self.is_here():
            return False
        process = _process(self.pid)
        if process is None:
            return not _exists(self.pid)
        state, started = process
        return state in "XZ" or started != self.started


class Lease:
    """A held lease. Use as a context manager; the heartbeat runs in a daemon thread until the end."""

    def __init__(self, path: Path, number: int, owner: Owner) -> None:
        self.path = path
        self.number = number
        self.owner = owner
        self._stop = threading.Event()
        self._beat = threading.Thread(target=self._heartbeat, name=f"lease-{path.name}", daemon=True)

    def check(self) -> None:
        """Raise LeaseLost unless this is still the highest lease of its key."""
        successor = self.path.with_name(f"{_stem(self.path)}.{self.number + 1}")
        if successor.exists() or not self._is_mine():
            raise LeaseLost(f"{_stem(self.path)}: another run has taken over; this one stops without publishing")

    def __enter__(self) -> "Lease":
        self._beat.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        # The heartbeat first: one that finds its file gone would report a lease lost by a stage that is done.
        self._stop.set()
        self._beat.join()
        if self._is_mine():
            self.path.unlink(missing_ok=True)

    def _is_mine(self) -> bool:
        owner = _read_owner(self.path)
        return owner is not None and owner.uuid == self.owner.uuid

    def _heartbeat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                self.check()
                os.utime(self.path)
            except (LeaseLost, FileNotFoundError):
                return  # the stage finds out itself at its next check()
            except OSError:
                continue  # a hiccup of the file system; the next beat tries again


def acquire(folder: Path, name: str, *, scope: Scope, on_wait: Callable[[str], None]) -> Lease:
    """Wait for the lease `name` and take it; start its heartbeat with `with`.

    `on_wait` gets a line that names the holder, at first and every `REPORT_SECONDS`; `scope` can end the wait.

    Raises:
        OSError: the folder cannot be written.
        Cancelled: while waiting.
    """
    folder.mkdir(parents=True, exist_ok=True)
    owner = Owner.me()
    watch = _Watch()
    interval, next_report = POLL_SECONDS[0], 0.0
    while True:
        numbers = _numbers(folder, name)
        top = max(numbers, default=0)
        holder = folder / f"{name}.{top}"
        if not numbers or watch.is_gone(holder):
            if lease := _take(folder, name, numbers, owner, replaced=watch.judged if numbers else None):
                return lease
            continue
        now = time.monotonic()
        if now >= next_report:
            next_report = now + REPORT_SECONDS
            on_wait(f"waiting for {name}: {_describe(_read_owner(holder))}")
        scope.pause(interval)
        interval = min(interval * 1.5, POLL_SECONDS[1])


def any_held(folder: Path, name: str) -> bool:
    """Whether someone may hold the lease `name`, of whatever number."""
    return folder.is_dir() and any(is_held(folder / f"{name}.{number}") for number in _numbers(folder, name))


def is_held(path: Path) -> bool:
    """False when the lease file is gone or its owner is known to be dead."""
    owner = _read_owner(path)
    return path.exists() if owner is None else not owner.is_dead()


class _Watch:
    """Observes one holder's heartbeat by this process's own clock."""

    def __init__(self) -> None:
        self._seen: tuple[str, int, int] | None = None
        self._since = 0.0
        self.judged: Owner | None = None
        """The owner that `is_gone` said is gone."""

    def is_gone(self, holder: Path) -> bool:
        self.judged = _read_owner(holder)  # first: opening it makes NFS fetch the time stamp afresh
        try:
            stat = os.stat(holder)
        except FileNotFoundError:
            return False  # released just now; look again
        beat = (holder.name, stat.st_ino, stat.st_mtime_ns)
        if beat != self._seen:
            self._seen, self._since = beat, time.monotonic()
        if time.monotonic() - self._since > STALE_SECONDS:
            return True
        return self.judged is not None and self.judged.is_dead()


def _take(folder: Path, name: str, numbers: list[int], owner: Owner, replaced: Owner | None) -> Lease | None:
    """Create the next lease and clear away the older ones; None when someone else was quicker."""
    top = max(numbers, default=0)
    if not _create(folder, name, top + 1, owner):
        return None
    path = folder / f"{name}.{top + 1}"
    if numbers and _read_owner(folder / f"{name}.{top}") != replaced:
        # Another taker replaced the dead holder, finished and left between our look and our link; the numbers may
        # have begun anew below ours.
        path.unlink()
        return None
    # Ascending, so that a holder that still finds its own file also finds its successor: see Lease.check.
    for number in sorted(numbers):
        (folder / f"{name}.{number}").unlink(missing_ok=True)
    return Lease(path, top + 1, owner)


def _create(folder: Path, name: str, number: int, owner: Owner) -> bool:
    """Create lease `number` with its content in one step; False when someone else was first."""
    draft = folder / f".{owner.uuid}"
    draft.write_text(json.dumps(asdict(owner)))
    target = folder / f"{name}.{number}"
    try:
        os.link(draft, target)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return _create_exclusively(target, draft.read_text())  # a file system without hard links
    finally:
        draft.unlink(missing_ok=True)


def _create_exclusively(target: Path, text: str) -> bool:
    # A reader may see it empty for a moment: an owner that cannot be read is never taken for dead.
    try:
        with open(target, "x") as file:
            file.write(text)
        return True
    except FileExistsError:
        return False


def _numbers(folder: Path, name: str) -> list[int]:
    prefix = f"{name}."
    tails = [entry[len(prefix) :] for entry in os.listdir(folder) if entry.startswith(prefix)]
    return [int(tail) for tail in tails if tail.isdigit()]


def _read_owner(path: Path) -> Owner | None:
    try:
        return Owner(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _describe(owner: Owner | None) -> str:
    return "another run holds it" if owner is None else f"process {owner.pid} on {owner.host} is computing it"


def _stem(path: Path) -> str:
    return path.name.rpartition(".")[0]


def _process(pid: int) -> tuple[str, int] | None:
    """(state, start in clock ticks since boot) of a process on this machine, None when it cannot be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[19])


def _exists(pid: int) -> bool:
    """Whether there is such a process, also where /proc hides those of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _boot_id() -> str:
    return _read_text("/proc/sys/kernel/random/boot_id")


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
