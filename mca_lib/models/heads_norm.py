"""RMSNorm of queries, or keys, over all heads of a token at once (OLMo 2).

Heads are split over the tensor parallel ranks, so that a rank has its heads' part of the sum of squares and of the
weight. The sum travels, one number per token; its gradient is the sum over the ranks in turn.

S tokens, B batch, N heads of this rank, D head size.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class HeadsRMSNorm(torch.nn.Module):
    """weight · x / √(mean x² + eps), the mean over all heads and channels of a token, in fp32.

    Args:
        heads: of all ranks.
        head_size: channels of one.
    """

    def __init__(self, config: TransformerConfig, heads: int, head_size: int, eps: float) -> None:
        super().__init__()
        self.eps, self.channels = eps, heads * head_size
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        share = self.channels // self.tp_group.size()
        self.weight = torch.nn.Parameter(torch.ones(share, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x_SBND: torch.Tensor) -> torch.Tensor:
        """Of the same shape and dtype."""
        heads_SBND = x_SBND.float()
        squares_SB11 = heads_SBND.square().sum((-2, -1), keepdim=True)
        if self.tp_group.size() > 1:
            squares_SB11 = reduce_from_tensor_model_parallel_region(squares_SB11, group=self.tp_group)
            squares_SB11 = copy_to_tensor_model_parallel_region(squares_SB11, group=self.tp_group)
        normal_SBND = heads_SBND * torch.rsqrt(squares_SB11 / self.channels + self.eps)
        return (normal_SBND * self.weight.float().view(x_SBND.shape[-2:])).type_as(x_SBND)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """For Megatron's checkpoints: the weight is split."""
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)
