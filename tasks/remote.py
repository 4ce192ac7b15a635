"""A second store that several machines share: an object store, or any file system that fsspec knows.

    <url>/<stage>/<key>/<upload>/<files>     the payload of one upload, under a name of its own
    <url>/<stage>/<key>/.artifact.json       {"record": …, "upload": …}, written last

An object store has no rename and no lock, so an upload never touches the files of another, and the record, one object,
decides which of them counts. What is fetched is checked byte by byte before it becomes an artifact here, so the
remote store need not be trusted with more than the records. Credentials come from the environment, as fsspec's
packages read them; a store that does not answer costs a warning and a computation, never a run.
"""

import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.digests import digest_file
from tasks.errors import StoreError
from tasks.process import secret_in
from tasks.record import RECORD_NAME, ArtifactRecord, UnreadableRecord, dumps, loads

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from tasks.report import Reporter
    from tasks.store import Artifact


def url_problem(url: str) -> str | None:
    """What is wrong with the URL of a store, without repeating what may be a secret; None when nothing is."""
    scheme, separator, rest = url.partition("://")
    if "@" in (rest or url).partition("/")[0] or secret_in(url):
        return "the URL holds credentials; give them in the environment instead"
    if not separator or not scheme or not rest:
        return f"{url!r} is no URL; write for instance s3://bucket/mcaflow"
    return None


class RemoteStore:
    """The store at `url`. Cheap to construct: nothing is asked before the first use."""

    def __init__(self, url: str) -> None:
        """Raises StoreError for a URL that carries credentials, or has no scheme."""
        if problem := url_problem(url):
            raise StoreError(f"store.remote: {problem}")
        self.url = url.rstrip("/")
        self._opened: tuple[AbstractFileSystem, str] | None = None
        self._has: dict[tuple[str, str], bool] = {}

    def require_package(self) -> None:
        """Raise StoreError where no installed package knows such URLs."""
        from fsspec import get_filesystem_class

        scheme = self.url.partition("://")[0]
        try:
            get_filesystem_class(scheme)
        except (ImportError, ValueError) as error:
            raise StoreError(f"store.remote: {scheme}:// cannot be used here: {_line(error)}") from None

    def has(self, stage: str, key: str) -> bool:
        """Whether an artifact is there, as far as can be asked: False for a store that does not answer.

        Asked once: a plan is made more than once in a run. `fetch` looks again.
        """
        if (stage, key) not in self._has:
            try:
                self._has[stage, key] = self._pointer(stage, key) is not None
            except Exception:  # of any of many packages, as in `fetch`
                self._has[stage, key] = False
        return self._has[stage, key]

    def record(self, stage: str, key: str) -> ArtifactRecord | None:
        """The record of an artifact that is there, else None. Raises whatever the file system raises."""
        found = self._pointer(stage, key)
        return found[0] if found else None

    def fetch(self, stage: str, key: str, staging: Path, report: "Reporter") -> ArtifactRecord | None:
        """Bring the payload of an artifact into `staging`, every byte checked; None where that cannot be done.

        Why is a warning, unless there simply is none. Then `staging` is to be thrown away.
        """
        try:
            found = self._pointer(stage, key)
            if found is None:
                return None
            record, upload = found
            fs, root = self._open()
            for number, (name, entry) in enumerate(sorted(record.files.items())):
                target = staging / name
                target.parent.mkdir(parents=True, exist_ok=True)
                fs.get_file(f"{root}/{stage}/{key}/{upload}/{name}", str(target))
                if target.stat().st_size != entry.size or digest_file(target) != entry.digest:
                    report.warning(f"{self.url}: {stage}/{key}/{name} has other bytes than its record says; not used")
                    return None
                report.progress(number + 1, len(record.files), fetched=name)
            return record.model_copy(update={"external": None})
        except UnreadableRecord as error:
            report.warning(f"{self.url}: {stage}/{key} {error}; not used")
        except Exception as error:  # of any of many packages: botocore, aiohttp, gcsfs, OSError
            report.warning(f"{self.url}: {stage}/{key[:12]} cannot be fetched: {_line(error)}")
        return None

    def push(self, artifact: "Artifact", report: "Reporter") -> bool:
        """Bring an artifact there, unless it has it with the same bytes; whether it has it now."""
        stage, key, record = artifact.stage, artifact.key, artifact.record
        try:
            try:
                known = self._pointer(stage, key)
            except UnreadableRecord:
                known = None
            if known is not None and known[0].files == record.files:
                return True
            fs, root = self._open()
            upload = uuid.uuid4().hex
            for name in sorted(record.files):
                fs.makedirs(f"{root}/{stage}/{key}/{upload}/{name}".rpartition("/")[0], exist_ok=True)
                fs.put_file(str(artifact.path / name), f"{root}/{stage}/{key}/{upload}/{name}")
            pointer = json.dumps({"record": json.loads(dumps(record)), "upload": upload})
            fs.pipe_file(f"{root}/{stage}/{key}/{RECORD_NAME}", pointer.encode())
            if known is not None:
                fs.rm(f"{root}/{stage}/{key}/{known[1]}", recursive=True)
            return True
        except Exception as error:
            report.warning(f"{self.url}: {stage}/{key[:12]} cannot be stored there: {_line(error)}")
            return False

    def _pointer(self, stage: str, key: str) -> tuple[ArtifactRecord, str] | None:
        fs, root = self._open()
        try:
            content = fs.cat_file(f"{root}/{stage}/{key}/{RECORD_NAME}")
        except FileNotFoundError:
            return None
        try:
            body = json.loads(content)
            upload, record = body["upload"], body["record"]
        except (ValueError, KeyError, TypeError):
            raise UnreadableRecord("is not a record") from None
        if not isinstance(upload, str) or not upload.isalnum():
            raise UnreadableRecord("is not a record")
        return loads(record, stage, key), upload

    def _open(self) -> "tuple[AbstractFileSystem, str]":
        if self._opened is None:
            from fsspec.core import url_to_fs

            options: dict[str, Any] = {}
            if self.url.startswith("s3://"):
                # Listings are remembered by default, and other machines write here too.
                options["use_listings_cache"] = False
            fs, root = url_to_fs(self.url, **options)
            self._opened = fs, str(root).rstrip("/")
        return self._opened


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
