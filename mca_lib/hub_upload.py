"""The job `upload_model`: {repo, folder, files: [names], message}  ->  {commit: id or null}.

The repository is created, private, where there is none. The token is HF_TOKEN and is written nowhere.
"""

import os
from collections.abc import Callable
from typing import Any

from mca_lib.errors import ConfigError


def upload_model(spec: dict[str, Any], progress: Callable[..., None]) -> dict[str, Any]:
    """Bring the files into the repository in one commit, which replaces what it had.

    Raises ConfigError where the hub refuses, or cannot be reached.
    """
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    repo = spec["repo"]
    api = HfApi(token=os.environ.get("HF_TOKEN") or False)
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo,
            folder_path=spec["folder"],
            allow_patterns=spec["files"],
            delete_patterns="*",
            commit_message=spec["message"],
        )
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, httpx.HTTPError, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"promote.push_to: {repo} on {api.endpoint} cannot be written: {reason}; set HF_TOKEN to a token that may"
        ) from error
    return {"commit": done.oid}
