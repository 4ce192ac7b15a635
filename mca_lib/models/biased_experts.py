"""Second projection of an expert with a bias.

Two things are wrong in Megatron's (0.19.2, `RowParallelLinear`) for the local layer's experts:

- its output may be a view of a custom autograd function, to which `MLP` then adds the bias in place, which torch
  refuses (with one rank per expert and without expert parallelism);
- its bias is marked for the sum of gradients over sequence parallel ranks, although an expert's tokens come from the
  dispatcher and are no share of a sequence: gradients would be counted twice, or those of other experts added.
"""

from typing import Any

from megatron.core.tensor_parallel import RowParallelLinear


class ExpertRowParallelLinear(RowParallelLinear):
    """Megatron's, of an expert that is not split."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.explicit_expert_comm = True  # nothing is summed here, as with expert parallelism
        self.bias.sequence_parallel = False
