"""A transformer layer that normalizes what attention and MLP put out, before it is added to the residual.

    x = x + norm(attention(x))        x = x + norm(mlp(x))

With the norms of the inputs as well (Gemma 3), or without (OLMo 2, https://arxiv.org/abs/2501.00656, section 3.2).
Megatron (0.19.2) has no such layer. The norms belong to the layer, behind its linear layers with their biases and
adapters, where they are the same for an MLP and for experts. Under sequence parallelism they see this rank's tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

WithBias = tuple[torch.Tensor, torch.Tensor | None]


class PostNormLayer(TransformerLayer):
    """Megatron's layer with two norms more.

    Args:
        post_norm: class of the norms, called as Megatron calls those of its layers.
    """

    def __init__(self, config: TransformerConfig, *args: Any, post_norm: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        size, epsilon = config.hidden_size, config.layernorm_epsilon
        self.post_attention_layernorm = post_norm(config=config, hidden_size=size, eps=epsilon)
        self.post_mlp_layernorm = post_norm(config=config, hidden_size=size, eps=epsilon)
        # Modules of the layer itself: what calls them here must not register them a second time.
        self.self_attn_bda = lambda *how: _normalized(self.post_attention_layernorm, *how)
        self.mlp_bda = lambda *how: _normalized(self.post_mlp_layernorm, *how)


def _normalized(
    norm: torch.nn.Module, training: bool, fused: bool
) -> Callable[[WithBias, torch.Tensor, float], torch.Tensor]:
    """Megatron's addition of bias, dropout and residual, with a norm after the bias."""
    add = get_bias_dropout_add(training, fused)

    def normalize_and_add(output_with_bias: WithBias, residual: torch.Tensor, dropout: float) -> torch.Tensor:
        output, bias = output_with_bias
        return add((norm(output if bias is None else output + bias), None), residual, dropout)

    return normalize_and_add
