"""A training whose numbers are not finite any more is ended, naming the rows of the step."""

import math
from collections.abc import Sequence
from pathlib import Path

from mca_lib.errors import ConfigError
from mca_lib.trainers.engine import StepMetrics


def refuse_divergence(step: int, metrics: StepMetrics, rows: Sequence[int], store: Path, learning_rate: float) -> None:
    """Raise ConfigError when the loss or the gradient norm of a step is not finite.

    An overflow of fp16, which is answered by a lower loss scale, is none; nor is a step in which no token has loss.
    """
    grad_norm = metrics.grad_norm if metrics.updated else 0.0
    for name, value in (("loss", metrics.loss if metrics.count else 0.0), ("grad_norm", grad_norm)):
        if not math.isfinite(value):
            raise ConfigError(
                f"training diverged: {name} is {value} at step {step}; lower learning_rate={learning_rate} or lengthen "
                f"the warm-up, and look at the rows of the step, "
                f"{', '.join(map(str, rows[:8]))}{', …' * (len(rows) > 8)} of {store}"
            )
