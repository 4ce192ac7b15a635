"""RMSNorm of the local layer.

Megatron's own wrapper of torch's RMSNorm refuses sequence parallelism. Under it every rank normalizes its share of
the sequence, so the weight's gradient is partial: Megatron sums it over the tensor parallel group for parameters
marked `sequence_parallel`.
"""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with Megatron's constructor and its mark for sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
