"""What came out of a run, as written to `train_result.json`. Its presence says that the run has come to its end."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

RESULT_NAME = "train_result.json"


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

    def write(self, output_dir: Path) -> None:
        """Whole or not at all; one rank only."""
        temporary = output_dir / f".{RESULT_NAME}"
        temporary.write_text(json.dumps(asdict(self), indent=1))
        os.replace(temporary, output_dir / RESULT_NAME)
