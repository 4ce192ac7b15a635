"""Models on a hub: which commit a revision is, which files it has, and getting them.

Two jobs of ``mca_lib.job``; they run in a process of their own, so a hub client reads its settings (``HF_ENDPOINT``,
``HF_HUB_OFFLINE``, proxies) afresh and a download can be killed. The token comes from the environment (``HF_TOKEN``)
and is written nowhere.

    resolve_model    {source, repo, revision}  ->  {commit, files: [{name, size, sha256, git_sha1}]}
                                               or  {unreachable: reason}
    download_model   {source, repo, revision, files: [...], target}  ->  {bytes}

A download continues where it stopped, within a file too, and each file is compared with the hash that the hub lists.
"""

import hashlib
import importlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mca_lib.errors import ModelError

# Also what an interruption may lose of a file.
_CHUNK = 128 << 10
_ATTEMPTS = 5
_WORKERS = 4
_REPORT_SECONDS = 1.0

type Progress = Callable[..., None]


def resolve_model(spec: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The commit and the files of a revision; see the module. Raises ModelError for what the hub does not have."""
    resolve = _resolve_modelscope if spec["source"] == "modelscope" else _resolve_huggingface
    return resolve(spec["repo"], spec["revision"])


def download_model(spec: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Bring ``files`` into the folder ``target``; see the module."""
    target = Path(spec["target"])
    target.mkdir(parents=True, exist_ok=True)
    if spec["source"] == "modelscope":
        _download_modelscope(spec["repo"], spec["revision"], spec["files"], target)
    else:
        _download_huggingface(spec["repo"], spec["revision"], spec["files"], target, progress)
    return {"bytes": sum(file["size"] for file in spec["files"])}


# -- Hugging Face ----------------------------------------------------------------------------------------------------


def _resolve_huggingface(repo: str, revision: str) -> dict[str, Any]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    field, api = f"model.name_or_path: {repo}", HfApi(token=_token())
    try:
        info = api.model_info(repo, revision=revision, files_metadata=True)
    except HFValidationError:
        raise ModelError(f"{field} is neither a local directory nor a repository id such as org/name") from None
    except GatedRepoError:
        raise ModelError(f"{field} is gated; accept its terms on {api.endpoint} and set HF_TOKEN") from None
    except RevisionNotFoundError:
        raise ModelError(f"model.revision: {repo} on {api.endpoint} has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        where = f"is no local directory, and {api.endpoint} has no such repository or it is private"
        raise ModelError(f"{field} {where}; check the name, or set HF_TOKEN") from None
    except (HfHubHTTPError, OfflineModeIsEnabled, _transport_error()) as error:
        return {"unreachable": f"{api.endpoint}: {_first_line(error)}"}
    files = [
        {
            "name": sibling.rfilename,
            "size": sibling.size or 0,
            "sha256": sibling.lfs.sha256 if sibling.lfs else None,
            "git_sha1": None if sibling.lfs else sibling.blob_id,
        }
        for sibling in info.siblings or []
    ]
    return {"commit": info.sha, "files": files}


def _download_huggingface(
    repo: str, commit: str, files: list[dict[str, Any]], target: Path, progress: Progress
) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    # Compressed transfers cannot be continued at a byte.
    headers = build_hf_headers(token=_token()) | {"Accept-Encoding": "identity"}
    meter = _Meter(sum(file["size"] for file in files), progress)

    def fetch(file: dict[str, Any]) -> None:
        path = target / file["name"]
        if path.exists() and path.stat().st_size == file["size"]:
            meter.add(file["size"])
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        url = hf_hub_url(repo, file["name"], revision=commit)
        _fetch(url, headers, path, file, meter)

    with ThreadPoolExecutor(_WORKERS) as pool:
        for done in [pool.submit(fetch, file) for file in files]:
            done.result()


def _fetch(url: str, headers: dict[str, str], path: Path, file: dict[str, Any], meter: "_Meter") -> None:
    """One file, by way of ``<name>.part``, which survives an interruption."""
    part = path.with_name(path.name + ".part")
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _append(url, headers, part, file["size"], meter)
        except _transport_error() as error:
            after = part.stat().st_size if part.exists() else 0
            failures = 0 if after > before else failures + 1
            if failures >= _ATTEMPTS:
                reason = str(error) or type(error).__name__
                raise ModelError(f"{url}: the download broke off ({reason}); run again to continue it") from None
            time.sleep(min(0.1 * 2**failures, 10))
            continue
        if _is_genuine(part, file):
            os.replace(part, path)
            return
        part.unlink()
        failures += 1
        if failures >= 2:
            raise ModelError(f"{url}: what arrives is not the file that the hub lists (size or hash differ)")


def _append(url: str, headers: dict[str, str], part: Path, size: int, meter: "_Meter") -> None:
    """Continue ``part`` up to ``size`` bytes."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import hf_raise_for_status

    have = part.stat().st_size if part.exists() else 0
    if have > size:
        part.unlink()
        have = 0
    meter.at(part.name, have)
    if have == size and size > 0:
        return
    asked = headers | ({"Range": f"bytes={have}-"} if have else {})
    with get_session().stream("GET", url, headers=asked, follow_redirects=True) as response:
        hf_raise_for_status(response)
        # A server that does not know ranges answers 200 with all of it.
        continued = response.status_code == 206
        with open(part, "ab" if continued else "wb") as out:
            for chunk in response.iter_bytes(_CHUNK):
                out.write(chunk)
                meter.at(part.name, out.tell())


def _is_genuine(part: Path, file: dict[str, Any]) -> bool:
    """Whether the bytes have the listed size and hash: SHA-256 for LFS files, git's SHA-1 for others."""
    if part.stat().st_size != file["size"]:
        return False
    if file.get("sha256"):
        with open(part, "rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest() == file["sha256"]
    if file.get("git_sha1"):
        content = part.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == file["git_sha1"]
    return True


class _Meter:
    """Bytes that have arrived over all files, reported once a second. Thread-safe."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total, self._progress = total, progress
        self._done, self._files = 0, {}
        self._lock, self._next = threading.Lock(), 0.0

    def at(self, name: str, size: int) -> None:
        with self._lock:
            self._files[name] = size
            self._report()

    def add(self, size: int) -> None:
        with self._lock:
            self._done += size
            self._report()

    def _report(self) -> None:
        done = self._done + sum(self._files.values())
        if time.monotonic() >= self._next or done >= self._total:
            self._next = time.monotonic() + _REPORT_SECONDS
            self._progress(done, self._total, unit="bytes")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _token() -> str | bool:
    """The token of the environment; False keeps the client from using one that lies on the disk."""
    return os.environ.get("HF_TOKEN") or False


def _transport_error() -> type[Exception]:
    """Base class of broken connections in the HTTP library that the hub client uses, which has changed over time."""
    from huggingface_hub import get_session

    library = importlib.import_module(type(get_session()).__mro__[-2].__module__.partition(".")[0])
    return library.TransportError


# -- ModelScope ------------------------------------------------------------------------------------------------------


def _resolve_modelscope(repo: str, revision: str) -> dict[str, Any]:
    """ModelScope lists no commit with its files, so a hash over names and contents stands for it."""
    hub = import_modelscope("modelscope_hub")
    errors = import_modelscope("modelscope_hub.errors")
    try:
        listed = hub.HubApi().list_repo_files(repo, "model", revision=_modelscope_branch(revision))
    except errors.NetworkError as error:
        return {"unreachable": f"ModelScope: {_first_line(error)}"}
    except errors.APIError as error:
        answer = _first_line(error)
        raise ModelError(f"model.name_or_path: {repo} at {revision}: ModelScope answers: {answer}") from None
    files = [
        {"name": entry.path, "size": entry.size, "sha256": entry.sha256, "git_sha1": None}
        for entry in sorted(listed, key=lambda entry: entry.path)
        if entry.type != "tree"
    ]
    content = "\n".join(f"{file['name']} {file['size']} {file['sha256']}" for file in files)
    return {"commit": hashlib.sha256(content.encode()).hexdigest()[:40], "files": files}


def _download_modelscope(repo: str, revision: str, files: list[dict[str, Any]], target: Path) -> None:
    names = [file["name"] for file in files]
    import_modelscope("modelscope").snapshot_download(
        repo, revision=_modelscope_branch(revision), local_dir=str(target), allow_patterns=names
    )
    for file in files:
        path = target / file["name"]
        if not path.exists() or not _is_genuine(path, file):
            raise ModelError(f"model.revision: {file['name']} of {repo} changed during the download; run again")


def _modelscope_branch(revision: str) -> str:
    # The default branch is called `master` there.
    return "master" if revision == "main" else revision


def import_modelscope(module: str) -> Any:
    """A module of ModelScope's client, an optional dependency. Raises ModelError when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ModelError(
            "model.source: modelscope needs the package modelscope >= 1.40; install mcaflow's extra `modelscope`"
        ) from None
