"""Multi-head latent attention whose gradients are right under tensor parallelism.

Every rank's heads use the same rotating channels of the key, so their gradient is the sum over the tensor parallel
ranks. Where the down projection is column parallel, Megatron (0.19.2, `MLASelfAttention`) gathers its output and hands
each rank the gradient of its own heads alone: half of it is lost at two ranks, while logits and loss are right.

S tokens on this rank, B batch, L latent of keys and values with the rotating channels after it.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules


class LatentSelfAttention(MLASelfAttention):
    """`MLASelfAttention` that gathers the latent of keys and values itself, and is made of what its spec says."""

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """Megatron's own resolution puts a norm before a direct query projection, where models have none."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(query latent, key/value latent); the latter whole, under sequence parallelism for this rank's tokens."""
        query_latent, latent_SBL = super()._qkv_down_projection(hidden_states)
        if self.config.tensor_model_parallel_size == 1:
            return query_latent, latent_SBL
        latent_SBL = gather_from_tensor_model_parallel_region(latent_SBL)
        if self.config.sequence_parallel:
            # Megatron gathers the rotating channels back over the tokens, which sums their gradients.
            return query_latent, scatter_to_sequence_parallel_region(latent_SBL)
        latent, rotating = latent_SBL.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        return query_latent, torch.cat([latent, copy_to_tensor_model_parallel_region(rotating)], dim=-1)
