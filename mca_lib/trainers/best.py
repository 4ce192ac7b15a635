"""The weights of the best evaluation: `best-<step>/` in the output directory, sealed, as a model is saved.

A checkpoint names the best step until then (`TrainerState.best`). It is resumed only while those weights are whole, and
they stay as long as it does; so a resumed run ends with the same model as one that was never interrupted.
"""

import math
import shutil
from pathlib import Path
from typing import Any

from mca_lib.checkpoint.collective import from_rank_0
from mca_lib.checkpoint.retention import BEST_PREFIX
from mca_lib.checkpoint.sealed import find_damage, move_into_place, naming, new_staging, seal
from mca_lib.data.indexed_rows import Rows
from mca_lib.errors import CheckpointError
from mca_lib.models import VirtualModels
from mca_lib.trainers.training_args import TrainingArguments


class BestModel:
    """Keeps the weights of the lowest held-out loss; every method is collective."""

    def __init__(self, output_dir: Path, model: VirtualModels) -> None:
        self._output_dir, self._model = output_dir, model
        self.found: dict[str, Any] | None = None
        """{"step", "loss"}; None before the first evaluation."""

    def offer(self, step: int, loss: float) -> None:
        """Keep the weights as they are now, if no earlier evaluation had so low a loss."""
        if not math.isfinite(loss) or (self.found and loss >= self.found["loss"]):
            return
        save_sealed(self._model, self._path(step), {"step": step, "eval_loss": loss})
        self.found = {"step": step, "loss": loss}

    def publish(self, directory: Path) -> None:
        """Copy the kept weights to `directory` with their record, whole or not at all.

        Raises:
            CheckpointError: they are damaged, or no evaluation had a finite loss.
        """
        from_rank_0(lambda: self._publish(directory))

    def _publish(self, directory: Path) -> None:
        if self.found is None:
            raise CheckpointError("load_best_model_at_end: no evaluation gave a finite loss, so no model is the best")
        source = self._path(self.found["step"])
        if damage := find_damage(source):
            raise CheckpointError(f"{source}: the best weights are damaged: {damage}; run again, to train anew from "
                                  "the newest checkpoint before them")  # fmt: skip
        staging = new_staging(directory.parent)
        _copy(source, staging)
        move_into_place(staging, directory)

    def _path(self, step: int) -> Path:
        return self._output_dir / f"{BEST_PREFIX}{step}"


def save_sealed(model: VirtualModels, directory: Path, meta: dict[str, Any]) -> None:
    """Write the weights as they are now, with a record, whole or not at all; collective."""
    staging = Path(from_rank_0(lambda: str(new_staging(directory.parent))))
    model.save_pretrained(staging)
    from_rank_0(lambda: seal(staging, directory, meta))


def _copy(source: Path, target: Path) -> None:
    """shutil.copytree would gather what the disk says into an error without a number."""
    for path in sorted(source.rglob("*")):
        to = target / path.relative_to(source)
        if path.is_dir():
            to.mkdir()
        else:
            with naming(to):
                shutil.copyfile(path, to)


def best_identity(args: TrainingArguments, held_out: Rows | None) -> dict[str, Any]:
    """What decides which model is the best, for the identity of a run; nothing where the last one is taken."""
    if not args.load_best_model_at_end or held_out is None:
        return {}
    return {
        "load_best_model_at_end": True,
        "eval_strategy": args.eval_strategy.value,
        "eval_steps": args.eval_steps,
        "eval rows": len(held_out),
        "eval tokens": held_out.num_tokens,
        "eval data": held_out.digest,
    }
