"""Self-attention with a norm over all heads of queries and keys.

Megatron's own norms of queries and keys see one head at a time. They are not what is put in place here: Megatron
(0.19.2) sums the gradient of whatever is called `q_layernorm` or `k_layernorm` over the tensor parallel ranks, which
is wrong for a weight that these split between them.
"""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from mca_lib.models.heads_norm import HeadsRMSNorm


class HeadsNormSelfAttention(SelfAttention):
    """Megatron's, with `query_norm` and `key_norm` after the projections."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        size, epsilon = self.hidden_size_per_attention_head, config.layernorm_epsilon
        self.query_norm = HeadsRMSNorm(config, config.num_attention_heads, size, epsilon)
        self.key_norm = HeadsRMSNorm(config, config.num_query_groups, size, epsilon)

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Queries, keys, values, and what else Megatron returns."""
        query, key, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        return self.query_norm(query), self.key_norm(key), *rest
