"""Which rows a step trains on: a pure function of the data set's size, the seed and the step. No torch here.

    epoch e     rows in the order of a permutation drawn from (seed, e)
    step s      the next `global_batch_size` rows of that order
    last step   of an epoch: what is left, possibly fewer rows. Nothing is dropped, nothing comes twice.

The order does not depend on how many ranks share it, nor on the micro batch size; so the position in the data is the
step number, and nothing else has to be saved to resume. A step of fewer rows is still one optimizer step, over the
mean of its own tokens. The rows of a step are dealt to data-parallel ranks in blocks of a micro batch:

    micro batch 0: rank 0 | rank 1 | …    micro batch 1: rank 0 | rank 1 | …

A short step has fewer micro batches, and its last ones may be partly or wholly empty for some ranks: an empty place
is `None` and carries no tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mca_lib.errors import ConfigError, DataError


@dataclass(frozen=True)
class BatchShape:
    """How the rows of one step are spread over replicas and micro batches."""

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int
    micro_batch_multiple: int = 1
    """Micro batches per step come in multiples of this: the pipeline size where the schedule is interleaved."""

    def __post_init__(self) -> None:
        per_micro_batch = self.micro_batch_size * self.data_parallel_size
        if self.global_batch_size % per_micro_batch:
            raise ConfigError(
                f"global_batch_size={self.global_batch_size} is not a multiple of micro_batch_size="
                f"{self.micro_batch_size} × data parallel size {self.data_parallel_size} = {per_micro_batch}"
            )

    def micro_batches(self, rows: int) -> int:
        """Of each replica, in a step of so many rows."""
        count = math.ceil(rows / (self.micro_batch_size * self.data_parallel_size))
        return math.ceil(count / self.micro_batch_multiple) * self.micro_batch_multiple

    def deal(self, rows: Sequence[int], rank: int) -> list[list[int | None]]:
        """This data-parallel rank's micro batches; `None` fills the places for which there is no row."""
        stride, count = self.micro_batch_size * self.data_parallel_size, self.micro_batches(len(rows))
        filled = [*rows, *[None] * (count * stride - len(rows))]
        starts = (m * stride + rank * self.micro_batch_size for m in range(count))
        return [filled[start : start + self.micro_batch_size] for start in starts]


@dataclass(frozen=True)
class Schedule:
    """The steps of a run."""

    num_rows: int
    global_batch_size: int
    seed: int
    num_train_epochs: float = 1.0
    max_steps: int = -1
    """Steps of the run whatever the epochs; -1 derives them from `num_train_epochs`."""
    _orders: dict[int, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise DataError("the training split has no rows")

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.num_rows / self.global_batch_size)

    @property
    def total_steps(self) -> int:
        """At least one; a fraction of an epoch ends at the step that completes it."""
        if self.max_steps > 0:
            return self.max_steps
        # The tolerance keeps 0.1 × 30 steps at 3: its product is 3.0000000000000004.
        return max(1, math.ceil(self.num_train_epochs * self.steps_per_epoch - 1e-9))

    def epoch_at(self, step: int) -> float:
        """Epochs that are done after `step` steps."""
        whole, rest = divmod(step, self.steps_per_epoch)
        return whole + min(1.0, rest * self.global_batch_size / self.num_rows)

    @property
    def trained_rows(self) -> np.ndarray:
        """int64 [N]: every row that the run trains on, once."""
        return self._order(0)[: self.total_steps * self.global_batch_size]

    def rows(self, step: int) -> list[int]:
        """Rows of the step that follows `step` finished ones."""
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.global_batch_size
        return self._order(epoch)[start : start + self.global_batch_size].tolist()

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            self._orders.clear()  # one epoch at a time: the order of a large set is large
            self._orders[epoch] = np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)
        return self._orders[epoch]
