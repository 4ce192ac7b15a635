"""A directory that appears whole or not at all: written beside its place, synced, renamed.

    NAME-partial-HHHHXXXXXXXX    being written, and locked (flock) by its writer; HHHH is of the host
    NAME-finished-XXXXXXXX       whole, and something else took its place meanwhile

A killed writer's folder is unlocked: the next run for the same NAME on the same host removes it. Where the file system
has no locks for folders (NFS), it stays.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import platform
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from mca_lib.checkpoint.sealed import move_into_place, sync
from mca_lib.errors import ConfigError

_HOST = hashlib.sha256(platform.node().encode()).hexdigest()[:4]
_UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)
"""What the user's path can be blamed for when a folder cannot be made."""
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""rename says so of a target that is a folder with something in it, or no folder."""


@contextlib.contextmanager
def published(target: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """A new folder beside `target`, which takes its place when the block ends without an error and goes otherwise.

    Args:
        replace: what is at `target` is replaced as a whole; else it must be absent or an empty folder.

    Raises:
        ConfigError: `target` holds something and `replace` is false, or no folder can be made there; said before the
            block runs. Or `target` was filled while the block ran: both are kept, and the message names the new one.
    """
    target = Path(target)
    _check(target, replace)
    staging, lock = _new_staging(target)
    try:
        yield staging
        if replace:
            move_into_place(staging, target)
        else:
            _put(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)


def _check(target: Path, replace: bool) -> None:
    try:
        if target.is_symlink():
            raise ConfigError(f"{target}: is a symbolic link; give the path of a folder itself")
        if target.exists() and not replace and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(f"{target}: exists and is not empty; choose another output or remove it")
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise _unusable(target, e) from e
    _remove_dead(target)


def _new_staging(target: Path) -> tuple[Path, int]:
    """(A new folder, the descriptor that locks it)."""
    while True:
        # No dot in what is appended: the store knows by the name up to the last one whose folder this is.
        staging = target.with_name(f"{target.name}-partial-{_HOST}{uuid.uuid4().hex[:8]}")
        try:
            staging.mkdir()
        except OSError as e:
            raise _unusable(target, e) from e
        lock = os.open(staging, os.O_RDONLY)
        # Between the two, another run may have taken the folder for a dead one's.
        if _locked(lock) is not False and _is_at(lock, staging):
            return staging, lock
        os.close(lock)


def _put(staging: Path, target: Path) -> None:
    """Rename when all bytes are on the disk; onto an empty folder or none, by the kernel's own rule."""
    sync(staging)
    try:
        os.rename(staging, target)
    except OSError as e:
        if e.errno not in _TAKEN:
            raise
        kept = target.with_name(f"{target.name}-finished-{uuid.uuid4().hex[:8]}")
        os.rename(staging, kept)
        raise ConfigError(f"{target}: was filled meanwhile and is left as it is; the finished result is {kept}") from e
    sync(target.parent, deep=False)


def _remove_dead(target: Path) -> None:
    """Remove what killed runs on this host left of the same target; a living run holds the lock of its folder."""
    pattern = re.compile(re.escape(f"{target.name}-partial-{_HOST}") + "[0-9a-f]{8}")
    for folder in [p for p in target.parent.iterdir() if pattern.fullmatch(p.name)]:
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # gone, or not ours to open
        try:
            if _locked(lock) and _is_at(lock, folder):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _locked(descriptor: int) -> bool | None:
    """Take the lock: True; False when another has it; None when the file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Is it the folder that was opened, still?"""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _unusable(target: Path, error: OSError) -> Exception:
    if error.errno not in _UNUSABLE:
        return error
    return ConfigError(f"{target}: no folder can be made there ({error.strerror}); choose another output")
