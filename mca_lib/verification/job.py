"""The job `verify_model` of `python -m mca_lib.job`.

{"model": HF directory, "layouts": [name, ...] or null, "max_difference": x or null, "max_kl": x or null,
 "generate": false}    → {"card": {...}, "markdown": "..."}
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mca_lib.converter.headers import weight_files
from mca_lib.errors import ResourceError
from mca_lib.memory import available_memory
from mca_lib.models.config import McaModelConfig, is_mca_checkpoint
from mca_lib.models.size import total
from mca_lib.ranks import RankError, RankPool
from mca_lib.verification.card import markdown
from mca_lib.verification.layouts import STANDARD
from mca_lib.verification.limits import CEILING, Limits
from mca_lib.verification.verify import Verification, verify

_ROUND_TRIP = 2
"""Copies of the weights that lie in the temporary folder at a time: the checkpoint, and what is exported from it."""


class VerificationFailed(Exception):
    """A rank failed for no reason that a user could mend; one line."""


def verify_model(spec: dict[str, Any], progress: Callable[..., None]) -> dict[str, Any]:
    """Verify a model at layouts.

    Raises:
        UserError: see `mca_lib.verification.verify`.
        VerificationFailed: the reference or a generation could not be computed.
    """
    directory, chosen = Path(spec["model"]), spec.get("layouts")
    if not is_mca_checkpoint(directory):  # which `verify` refuses
        _check_space(directory)
        _check_memory(directory)
    limits = None
    if spec.get("max_difference") is not None or spec.get("max_kl") is not None:
        limits = Limits(spec.get("max_difference") or CEILING.max_difference, spec.get("max_kl") or CEILING.kl)
    task = Verification(
        directory,
        tuple(chosen) if chosen else STANDARD,
        limits,
        generate=bool(spec.get("generate")),
        stand_ins=not chosen,
    )
    done, steps = 0, 3 + len(task.layouts) + task.generate

    def tell(text: str) -> None:
        nonlocal done
        done += 1
        progress(min(done, steps), steps, text=text)

    try:
        with RankPool() as pool:
            card = verify(task, pool, tell)
    except RankError as error:
        raise VerificationFailed(error.summary) from error
    return {"card": json.loads(card.to_json()), "markdown": markdown(card)}


def _check_memory(directory: Path) -> None:
    needed, available = 4 * total(McaModelConfig.from_pretrained(directory)), available_memory()
    if needed > available:
        raise ResourceError(
            f"{directory}: {needed / 1e9:.1f} GB in fp32, and {available / 1e9:.1f} GB of memory are available; "
            "verify on a larger machine"
        )


def _check_space(directory: Path) -> None:
    needed = _ROUND_TRIP * sum(path.stat().st_size for path in weight_files(directory))
    folder = tempfile.gettempdir()
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ResourceError(
            f"{folder}: {free / 1e9:.1f} GB are free, the round trip takes {needed / 1e9:.1f} GB; set TMPDIR to a "
            "folder with more room"
        )
