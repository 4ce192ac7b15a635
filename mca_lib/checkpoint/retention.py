"""Which checkpoints of a run stay on the disk.

    checkpoint-N    the newest `newest` ones, and those of multiples of `every`
    best-N          weights of the best evaluation: what a checkpoint that stays names, and what is newer than all

Removal never touches the checkpoint that was written last, and one that fails is no reason to stop a training.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mca_lib.checkpoint.sealed import remove

PREFIX = "checkpoint-"
BEST_PREFIX = "best-"
STATE_NAME, STATE_FOLDER = "trainer.json", "state"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept."""

    newest: int | None = None
    """None or 0: all."""
    every: int = 0
    """Multiples of this many steps stay too; 0: none."""

    def apply(self, output_dir: Path) -> None:
        """Remove what is not kept, oldest first; the newest checkpoint is whole."""
        found = numbered(output_dir, PREFIX)
        spared = {step for step in found if self.every and step % self.every == 0}
        spared |= set(list(found)[-self.newest :] if self.newest else found)
        for step, path in found.items():
            if step not in spared:
                _try_to_remove(path)
        named = {best["step"] for step in spared if (best := _best_of(found[step]))}
        for step, path in numbered(output_dir, BEST_PREFIX).items():
            if step not in named and step <= max(spared, default=step):
                _try_to_remove(path)


def numbered(output_dir: Path, prefix: str) -> dict[int, Path]:
    """Step → directory, oldest first."""
    return dict(sorted(_numbered(output_dir, prefix)))


def _numbered(output_dir: Path, prefix: str) -> Iterator[tuple[int, Path]]:
    for path in output_dir.glob(f"{prefix}*"):
        number = path.name.removeprefix(prefix)
        if number.isascii() and number.isdigit():
            yield int(number), path


def _best_of(checkpoint: Path) -> dict[str, Any] | None:
    """What a checkpoint says of the best evaluation until then; None too where it cannot be read any more."""
    try:
        return json.loads((checkpoint / STATE_NAME).read_text())["best"]
    except (OSError, ValueError, KeyError):
        return None


def _try_to_remove(path: Path) -> None:
    try:
        remove(path)
    except OSError as error:
        log.warning("%s is no longer needed and cannot be removed: %s", path, error.strerror or error)
