"""The model that `model_name_or_path` names, as a local directory. Imports no hub before it is asked."""

import os
from pathlib import Path

from mca_lib.errors import ModelError


def download_model(model_name_or_path: str, local_dir: str | None = None) -> str:
    """A local directory with the model: itself, or a snapshot from the hub (ModelScope with USE_MODELSCOPE=1).

    Callers on one machine download once: the others wait at a lock and find the files.

    Raises:
        ModelError: the path does not exist, or the hub has no such model or cannot be reached.
    """
    if os.path.isdir(model_name_or_path):
        return model_name_or_path
    if model_name_or_path.startswith((".", "/", "~")):
        raise ModelError(f"model_name_or_path={model_name_or_path!r} is not a directory")
    from filelock import FileLock

    cache = Path(os.environ.get("MCAFLOW_CACHE", "~/.cache/mcaflow")).expanduser() / "locks"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{model_name_or_path.replace('/', '--')}.lock"):
        if os.environ.get("USE_MODELSCOPE", "0").lower() in ("1", "true"):
            from modelscope import snapshot_download
        else:
            from huggingface_hub import snapshot_download
        try:
            return snapshot_download(model_name_or_path, local_dir=local_dir)
        except Exception as error:  # the hubs' clients raise their HTTP library's errors, their own, and OSError
            reason = " ".join(str(error).split())
            raise ModelError(f"model_name_or_path={model_name_or_path!r} cannot be downloaded: {reason}") from error
