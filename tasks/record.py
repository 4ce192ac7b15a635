"""The record of an artifact: what it is, what it was made of, and the digest of every file.

It is the last file written into an artifact, so a directory with a record is a whole artifact. The file carries
a checksum over itself: a flipped bit in the record is found like one in the payload.
"""

import json
import math
import os
import platform
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.canonical import blake3_hex, canonical_json, stage_key
from tasks.errors import CanonicalError, StoreError

RECORD_NAME = ".artifact.json"
FORMAT = 1
RUN_ID = uuid.uuid4().hex
"""One per process; says which artifacts one run made."""

# Named in the record, not in the key: `plan` mentions a difference.
LIBRARIES = (
    "mcaflow", "torch", "megatron-core", "transformers", "tokenizers", "llamafactory", "safetensors", "numpy",
)  # fmt: skip


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Frozen):
    """One file of the payload."""

    size: int
    digest: str
    """BLAKE3, 64 hex digits."""


class InputEntry(_Frozen):
    """One input artifact, or the part of it that the key holds."""

    digest: str
    stage: str
    key: str


class Producer(_Frozen):
    """Who made it, when, with what. `started` is UTC, ISO 8601."""

    host: str
    pid: int
    run_id: str
    started: str
    seconds: float
    libraries: dict[str, str]


class ArtifactRecord(_Frozen):
    """Content of `.artifact.json`."""

    format: int = FORMAT
    stage: str
    version: int
    key: str
    payload: dict[str, Any]
    """What the key was made of; a later miss is explained by it."""
    digest: str
    """Of the content, as later stages see it."""
    parts: dict[str, str] = Field(default_factory=dict)
    files: dict[str, FileEntry] = Field(default_factory=dict)
    external: str | None = None
    """Where the payload lies when it is not in the store."""
    inputs: dict[str, InputEntry] = Field(default_factory=dict)
    producer: Producer
    stats: dict[str, Any] = Field(default_factory=dict)


class UnreadableRecord(Exception):
    """The record is absent, damaged or of another artifact; the message says which."""


def producer(started: float, seconds: float) -> Producer:
    """This process as the producer; `started` in seconds since the epoch."""
    return Producer(
        host=socket.gethostname(),
        pid=os.getpid(),
        run_id=RUN_ID,
        started=utc(started),
        seconds=round(seconds, 3),
        libraries=library_versions(),
    )


def utc(seconds: float | None = None) -> str:
    """A time in seconds since the epoch, or now, as ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def library_versions() -> dict[str, str]:
    """Installed versions of the libraries that shape outputs, read from package metadata without importing them."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def finite(value: Any) -> Any:
    """Statistics as JSON: a loss that is NaN becomes the text "nan", so that it can be recorded at all."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def dumps(record: ArtifactRecord) -> str:
    """Text of the record file."""
    body = record.model_dump(mode="json")
    return json.dumps({**body, "checksum": _checksum(body)}, indent=1, allow_nan=False) + "\n"


def load(path: Path, stage: str, key: str) -> ArtifactRecord:
    """Read and check the record at `path`, which must be of this stage and key.

    Raises:
        UnreadableRecord: absent, damaged, or of another artifact.
        StoreError: written by a newer release, or not readable by this user.
    """
    try:
        body = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise UnreadableRecord("has no record") from None
    except PermissionError:
        raise StoreError(f"{path}: not readable by this user; mend the permissions of the store") from None
    except (OSError, ValueError) as error:
        raise UnreadableRecord(f"is unreadable ({error})") from None
    return loads(body, stage, key, where=str(path))


def loads(body: Any, stage: str, key: str, where: str = "record") -> ArtifactRecord:
    """Check the content of a record, which must be of this stage and key; errors as of `load`."""
    if not isinstance(body, dict):
        raise UnreadableRecord("is not a record")
    body = dict(body)
    if isinstance(body.get("format"), int) and body["format"] > FORMAT:
        raise StoreError(
            f"{where}: record format {body['format']} is of a newer mcaflow (this one knows {FORMAT}); upgrade"
        )
    checksum = body.pop("checksum", None)
    try:
        if checksum != _checksum(body):
            raise UnreadableRecord("does not match its checksum")
        record = ArtifactRecord.model_validate(body)
    except (CanonicalError, ValidationError, ValueError) as error:
        raise UnreadableRecord(f"is not a record ({str(error).splitlines()[0]})") from None
    if (record.stage, record.key) != (stage, key):
        raise UnreadableRecord(f"belongs to {record.stage}/{record.key}")
    if stage_key(record.payload) != key:
        raise UnreadableRecord("holds a payload of another key")
    return record


def _checksum(body: dict[str, Any]) -> str:
    return blake3_hex(canonical_json(body, "record"))
