"""Self-attention with what Megatron's lacks: a norm over all heads of queries and keys, a rope for each kind of layer.

Megatron's own norms of queries and keys see one head at a time. They are not what is put in place here: Megatron
(0.19.2) sums the gradient of whatever is called `q_layernorm` or `k_layernorm` over the tensor parallel ranks, which
is wrong for a weight that these split between them.

S tokens, D channels of a head that rotate.
"""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

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


class TwoRopesSelfAttention(SelfAttention):
    """Megatron's, where layers with a window rotate otherwise. The layers get both ropes in one tensor."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        rotary_pos_emb: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`rotary_pos_emb` [S, 1, 1, 2·D] has the angles of `model_frequencies`, twice."""
        if rotary_pos_emb is not None:
            config = self.config
            windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number)
            angles = rotary_pos_emb.unflatten(-1, (2, 2, -1))  # twice, ropes, angles
            rotary_pos_emb = angles[..., int(windowed), :].flatten(-2)
        return super().forward(hidden_states, attention_mask, *args, rotary_pos_emb=rotary_pos_emb, **kwargs)
