"""What came out of a run, as written to `train_result.json`. Its presence says that the run has come to its end."""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch.distributed as dist

from mca_lib.checkpoint.sealed import sync
from mca_lib.platforms import current_platform
from mca_lib.trainers.names import RESULT_NAME
from mca_lib.trainers.preflight import Preflight
from mca_lib.trainers.progress import Totals, curve, read_log


@dataclass(frozen=True)
class TrainResult:
    """What came out."""

    steps: int
    """Made; fewer than planned where a callback stopped the run."""
    epochs: float
    final_loss: float | None
    """Of the last logged step."""
    train_loss: float | None
    """Mean over the whole run, per token with loss or per pair."""
    eval_loss: float | None
    """The same over the evaluation split after the last step; None without one."""
    eval_measures: dict[str, float | None]
    """What else the objective measures there."""
    best: dict[str, float] | None
    """Step and loss of the best evaluation, whose model is the result; None where the last one is."""
    tokens: int
    """Tokens that went through the model, padding excluded."""
    trained_tokens: int
    """Tokens with loss."""
    tokens_per_second: float
    seconds: float
    """Spent in steps, over all attempts."""
    peak_memory_mb: list[float]
    """By rank."""
    world_size: int
    restarts: int
    """How often the launcher started all ranks again after a failure, in the run that came to the end."""
    preflight: Preflight | None
    """Of the last attempt."""

    @classmethod
    def of(
        cls,
        steps: int,
        epochs: float,
        totals: Totals,
        final_loss: float,
        held_out: dict[str, float],
        best: dict[str, float] | None,
        preflight: Preflight | None,
    ) -> Self:
        """From the counters of the run; all ranks take part."""
        peaks: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(peaks, round(current_platform().peak_memory_bytes() / 2**20, 1))
        means = {name: value if math.isfinite(value) else None for name, value in held_out.items()}
        return cls(
            steps=steps,
            epochs=round(epochs, 4),
            final_loss=final_loss if math.isfinite(final_loss) else None,
            train_loss=totals.loss_sum / totals.count if totals.count else None,
            eval_loss=means.pop("loss", None),
            eval_measures=means,
            best=best,
            tokens=totals.tokens,
            trained_tokens=totals.loss_tokens,
            tokens_per_second=round(totals.tokens / max(totals.seconds, 1e-9), 1),
            seconds=round(totals.seconds, 3),
            peak_memory_mb=peaks,
            world_size=dist.get_world_size(),
            restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            preflight=preflight,
        )

    def write(self, output_dir: Path) -> None:
        """Whole or not at all, with the curves of the log; one rank only."""
        temporary = output_dir / f".{RESULT_NAME}"
        curves = {name: curve(read_log(output_dir), name) for name in ("loss", "eval_loss", "learning_rate")}
        temporary.write_text(json.dumps(asdict(self) | {"curves": curves}, indent=1))
        sync(temporary, deep=False)
        os.replace(temporary, output_dir / RESULT_NAME)
        sync(output_dir, deep=False)
