"""A promoted model goes where servers look for it: a directory, or a repository of the Hugging Face Hub.

Only the present holder of the name is pushed, under the lock of the name: of two runs at once, the one that lost the
name meanwhile leaves what the other has pushed. A push that failed is made up for by the next attempt.
"""

import json
import shutil
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

from mca_lib.checkpoint.publish import published
from mca_lib.errors import ConfigError
from tasks.aliases import Aliases
from tasks.jobs import run_job
from tasks.store import Artifact, ArtifactStore

HUB = "hf://"
MARKER = ".mcaflow.json"
"""In a directory that was pushed: which artifact it holds."""


def push_problem(target: str) -> str | None:
    """What is wrong with a target; None when nothing is. Looks at the file system, asks no hub."""
    if target.startswith(HUB):
        repo = target.removeprefix(HUB)
        return None if repo.count("/") == 1 and all(repo.split("/")) else f"{target!r}: write hf://ORGANIZATION/NAME"
    if "://" in target:
        return f"{target!r} is neither a directory nor a repository hf://ORGANIZATION/NAME"
    path = Path(target).expanduser()
    if path.exists() and not (path / MARKER).is_file() and (not path.is_dir() or any(path.iterdir())):
        return f"{target} holds something that was not pushed there; name an empty folder, or a new one"
    return None


def push(
    store: ArtifactStore, model: str, alias: str, artifact: Artifact, target: str, check: Callable[[], None]
) -> bool:
    """Bring the holder of the name there; False where `artifact` is no longer the holder.

    A directory is replaced as a whole, and appears whole; a reader may find none for an instant. A hub gets one commit,
    none where it has the same files. Its token is HF_TOKEN.

    Args:
        check: called while a hub is being written to; what it raises ends that.

    Raises:
        ConfigError: the target is not to be used, or the hub refuses.
        StageFailed: the upload failed otherwise.
    """
    names = Aliases(store)
    with names.locked(model):
        holder = names.current(model, alias)
        if holder is None or (holder.stage, holder.key, holder.digest) != (
            artifact.stage,
            artifact.key,
            artifact.digest,
        ):
            return False
        if problem := push_problem(target):
            raise ConfigError(f"promote.push_to: {problem}")
        if target.startswith(HUB):
            _upload(artifact, target.removeprefix(HUB), check)
        else:
            _replace(artifact, Path(target).expanduser())
    return True


def _replace(artifact: Artifact, target: Path) -> None:
    marker = json.dumps({"stage": artifact.stage, "key": artifact.key, "digest": artifact.digest})
    if (target / MARKER).is_file() and (target / MARKER).read_text(encoding="utf-8") == marker:
        return
    with published(target, replace=True) as staging:
        for name in artifact.record.files:
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(artifact.path / name, staging / name)
        (staging / MARKER).write_text(marker, encoding="utf-8")


def _upload(artifact: Artifact, repo: str, check: Callable[[], None]) -> None:
    spec = {
        "repo": repo,
        "folder": str(artifact.path),
        "files": sorted(artifact.record.files),
        "message": f"{artifact.stage}/{artifact.key[:12]}",
    }
    with tempfile.TemporaryDirectory() as folder:
        run_job(
            "upload_model",
            spec,
            folder=Path(folder),
            tag=f"upload-{uuid.uuid4().hex}",
            secrets=("HF_TOKEN",),
            env={"HF_HUB_DISABLE_TELEMETRY": "1"},
            check=check,
        )
