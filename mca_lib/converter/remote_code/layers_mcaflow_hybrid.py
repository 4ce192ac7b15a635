"""Attention, MLP and experts of a hybrid, and what is around them.

Shapes: B batch, S tokens of this call, T tokens with those before, E hidden size, H query heads, G key/value heads,
D channels of a head, N tokens of all rows, K experts of a token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .configuration_mcaflow_hybrid import McaflowHybridConfig

KeysValues = tuple[torch.Tensor, torch.Tensor]
"""Of all tokens so far, [B, G, T, D]."""


@dataclass
class Context:
    """What all layers of one call share."""

    rotary: tuple[torch.Tensor, torch.Tensor]
    mask_B1ST: torch.Tensor | None
    """True where a query sees a key; None: plainly causal, or one query that sees all."""
    window_B1ST: torch.Tensor | None
    """The same within the sliding window."""
    tokens_BS: torch.Tensor | None
    """0 where there is no token but padding; None: nowhere."""


class RMSNorm(nn.Module):
    """In fp32 whatever the weights are."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(hidden.dtype)


class Rotary(nn.Module):
    """cos and sin of the rotary positions, [B, 1, S, D], with transformers' frequencies of every scaling."""

    def __init__(self, config: McaflowHybridConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", torch.empty(config.head_dim // 2), persistent=False)
        self.scaling = self.reset(self.inv_freq.device)

    def reset(self, device: torch.device | None = None) -> float:
        """Compute the frequencies; returns the factor of cos and sin."""
        rope, size = self.config.rope_parameters, self.config.head_dim
        if rope.get("rope_type", "default") == "default":
            powers = torch.arange(0, size, 2, dtype=torch.int64).to(device=device, dtype=torch.float) / size
            frequencies, scaling = 1.0 / rope["rope_theta"] ** powers, 1.0
        else:
            frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](self.config, device)
        self.inv_freq = frequencies
        return scaling

    def forward(self, position_ids_BS: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids_BS[:, None, :, None].float() * self.inv_freq
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Channel i and channel i + D/2 turn together."""
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    """Causal attention with grouped keys and values."""

    def __init__(self, config: McaflowHybridConfig, layer_idx: int) -> None:
        super().__init__()
        self.head_dim, self.dropout = config.head_dim, config.attention_dropout
        self.windowed = config.sliding_window is not None and layer_idx not in config.full_attention_layers
        query, key = (n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, query, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=config.attention_bias)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=config.attention_output_bias)
        norm: Callable[[], nn.Module] = (
            (lambda: RMSNorm(self.head_dim, config.rms_norm_eps)) if config.use_qk_norm else nn.Identity
        )
        self.q_norm, self.k_norm = norm(), norm()

    def forward(
        self, hidden_BSE: torch.Tensor, state: KeysValues | None, context: Context
    ) -> tuple[torch.Tensor, KeysValues]:
        query_BHSD, key_BGSD, value_BGSD = (
            norm(project(hidden_BSE).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
            for project, norm in ((self.q_proj, self.q_norm), (self.k_proj, self.k_norm), (self.v_proj, nn.Identity()))
        )
        query_BHSD, key_BGSD = (rotate(heads, *context.rotary) for heads in (query_BHSD, key_BGSD))
        if state is not None:
            key_BGSD, value_BGSD = (
                torch.cat([earlier, new], 2) for earlier, new in zip(state, (key_BGSD, value_BGSD), strict=True)
            )
        mask = context.window_B1ST if self.windowed else context.mask_B1ST
        output_BHSD = F.scaled_dot_product_attention(
            query_BHSD,
            key_BGSD,
            value_BGSD,
            attn_mask=mask,
            is_causal=mask is None and query_BHSD.shape[2] > 1,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=query_BHSD.shape[1] != key_BGSD.shape[1],
        )
        return self.o_proj(output_BHSD.transpose(1, 2).flatten(2)), (key_BGSD, value_BGSD)


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, hidden_size: int, size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, size, bias=bias)
        self.down_proj = nn.Linear(size, hidden_size, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Experts(nn.Module):
    """Each token goes to the experts that its router rates best, and where there is one to the shared expert."""

    def __init__(self, config: McaflowHybridConfig) -> None:
        super().__init__()
        self.topk, self.normalize = config.num_experts_per_tok, config.norm_topk_prob
        self.scaling = config.routed_scaling_factor
        size, shared = config.hidden_size, config.shared_expert_intermediate_size
        self.gate = nn.Linear(size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(MLP(size, config.moe_intermediate_size) for _ in range(config.num_experts))
        self.shared_expert = MLP(size, shared) if shared is not None else None
        self.shared_expert_gate = nn.Linear(size, 1, bias=False) if config.use_shared_expert_gate else None

    def forward(self, hidden_BSE: torch.Tensor) -> torch.Tensor:
        hidden_NE = hidden_BSE.flatten(0, 1)
        weights_NK, chosen_NK = F.linear(hidden_NE.float(), self.gate.weight.float()).softmax(-1).topk(self.topk, -1)
        if self.normalize:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        weights_NK = (weights_NK * self.scaling).to(hidden_NE.dtype)
        output_NE = torch.zeros_like(hidden_NE)
        for number in chosen_NK.unique().tolist():
            tokens, places = torch.where(chosen_NK == number)
            expert_output = self.experts[number](hidden_NE[tokens]) * weights_NK[tokens, places, None]
            output_NE = output_NE.index_add(0, tokens, expert_output)
        if self.shared_expert is not None:
            shared_NE = self.shared_expert(hidden_NE)
            if self.shared_expert_gate is not None:
                shared_NE = self.shared_expert_gate(hidden_NE).sigmoid() * shared_NE
            output_NE = output_NE + shared_NE
        return output_NE.view_as(hidden_BSE)
