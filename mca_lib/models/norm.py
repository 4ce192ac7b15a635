"""RMSNorm of the local layer.

Megatron's own wrapper of torch's RMSNorm refuses sequence parallelism and zero-centred weights. Under sequence
parallelism every rank normalizes its share of the sequence, so the weight's gradient is partial: Megatron sums it over
the tensor parallel group for parameters marked `sequence_parallel`.
"""

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with Megatron's constructor and its mark for sequence parallelism.

    With `zero_centered`, by default the config's `layernorm_zero_centered_gamma`, it multiplies by 1 + weight, and a
    fresh weight is 0.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, zero_centered: bool | None = None
    ) -> None:
        self.zero_centered = config.layernorm_zero_centered_gamma if zero_centered is None else zero_centered
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.zero_centered:
            torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.zero_centered:
            return super().forward(x)
        # In fp32: 1 + weight rounded to bf16 would lose most of the weight.
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).type_as(x)
