"""Log-probabilities of the reference model: computed once, before the first step, and kept beside the checkpoints.

    <output_dir>/reference/train.npy    float64 [D]: log p of each document's scored tokens; nan where no step needs it
    <output_dir>/reference/eval.npy
    <output_dir>/reference/.record.json

The reference is the model that training starts from. It is asked in the micro batches in which the policy will be
asked during the first epoch, so that at the first step both have the same bits and not only the same values. A run that
is resumed reads them; trained weights are never asked. A damaged file is computed anew, from the weights that the
model came with.
"""

import logging
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mca_lib.checkpoint.sealed import find_damage, new_staging, read_record, remove_leftovers, seal
from mca_lib.errors import CheckpointError, ModelError
from mca_lib.trainers.engine import Engine
from mca_lib.trainers.pairs import LogProbabilities, PairBatch

NAME = "reference"
log = logging.getLogger(__name__)

type Steps = Iterable[Sequence[PairBatch]]
"""This rank's micro batches of each step, without a reference in them."""


def reference_logps(
    output_dir: Path,
    engine: Engine,
    run: Mapping[str, Any],
    sizes: Mapping[str, int],
    steps: Mapping[str, Callable[[], Steps]],
) -> dict[str, np.ndarray]:
    """The log-probabilities of each split, float64 [D], the same on every rank; all ranks take part.

    Args:
        output_dir: where they are kept.
        engine: holds the weights of the reference, that is those which the model came with.
        run: what the run is about.
        sizes: documents of each split.
        steps: for each split, what yields its micro batches.

    Raises:
        CheckpointError: those that are kept there are of a run with other settings, or of another model.
        ModelError: a log-probability is not finite.
    """
    kept = _read(output_dir / NAME, run, sizes, engine.device)
    if kept is not None:
        _check_model(output_dir / NAME, kept, engine, next(iter(steps["train"]())))
        return kept
    log.info("log-probabilities of the reference model: %d documents", sum(sizes.values()))
    found = {split: _compute(engine, steps[split](), size) for split, size in sizes.items()}
    if dist.get_rank() == 0:
        staging = new_staging(output_dir)
        for split, values_D in found.items():
            np.save(staging / f"{split}.npy", values_D)
        seal(staging, output_dir / NAME, {"run": dict(run)})
    dist.barrier()
    return found


def _compute(engine: Engine, steps: Steps, size: int) -> np.ndarray:
    """Log-probabilities of the documents that occur in the steps; nan for the others."""
    # Row 0: sums of log-probabilities, row 1: how often each was computed.
    values_2D = torch.zeros(2, size, dtype=torch.float64, device=engine.device)
    for batches in steps:
        for report in engine.reports(batches, LogProbabilities()):
            if parallel_state.get_context_parallel_rank() == 0:
                values_2D[0, report["documents_D"]] = report["logps_D"]
                values_2D[1, report["documents_D"]] = 1
    sums_D, counts_D = engine.total(values_2D).cpu().numpy()
    if not np.isfinite(sums_D).all():
        raise ModelError(
            "the model gives answers of the data set a log-probability that is not finite, before any step"
        )
    return np.where(counts_D > 0, sums_D, np.nan)


def _read(
    path: Path, run: Mapping[str, Any], sizes: Mapping[str, int], device: torch.device
) -> dict[str, np.ndarray] | None:
    """What is kept at `path`, as rank 0 reads it; None when there is nothing whole."""
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        remove_leftovers(path.parent)
        if path.exists() and (damage := find_damage(path)):
            log.warning("%s is computed anew: %s", path, damage)
            shutil.rmtree(path)
        elif path.exists():
            saved = read_record(path)["run"]
            # A split that it does not have is no contradiction: all of it is computed anew.
            differing = [name for name, value in run.items() if name in saved and saved[name] != value]
            if differing:
                name = differing[0]
                box[1] = (
                    f"{path} was made with {name}={saved.get(name)!r}, this run has {run[name]!r}: "
                    "use another output_dir, or remove it"
                )
            box[0] = {split: np.load(path / f"{split}.npy") for split in sizes if (path / f"{split}.npy").exists()}
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise CheckpointError(box[1])
    kept = box[0]
    whole = kept is not None and all(split in kept and len(kept[split]) == size for split, size in sizes.items())
    return kept if whole else None


def _check_model(path: Path, kept: dict[str, np.ndarray], engine: Engine, first: Sequence[PairBatch]) -> None:
    """Ask the model again for the first step of training. Layouts differ by rounding, another model by far more."""
    again_D = _compute(engine, [first], len(kept["train"]))
    asked = np.isfinite(again_D)
    tolerance = 0.05 if engine.args.bf16 else 1e-3
    if not np.allclose(again_D[asked], kept["train"][asked], rtol=tolerance, atol=tolerance):
        raise CheckpointError(
            f"{path} holds log-probabilities of another model than the one that training starts from: "
            "use another output_dir, or remove it"
        )
