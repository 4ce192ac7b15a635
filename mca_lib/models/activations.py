"""Activations that a training step keeps for its backward pass: an estimate. No torch.

In the manner of Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198, section 4): what the backward pass of each
operation needs is added up. Their layer keeps s·b·h·(34 + 5·a·s/h) bytes; here the terms are those of this
architecture: SwiGLU, grouped queries, no dropout, attention that does not keep the s × s scores (FlashAttention, SDPA),
experts that receive equal shares of the tokens, a Mamba kernel that keeps its input and output (that in plain PyTorch,
for ranks without a GPU, keeps some 40 KB per token and layer at SmolLM2's sizes on top of the 10 KB counted here). Not
counted are those of a vision tower, which depend on the images, and what the C library keeps of freed memory: on CPU
up to a fifth on top (`mca_lib.heap`).
"""

from dataclasses import dataclass
from typing import Literal

from mca_lib.converter.mappings import padded_vocab_size
from mca_lib.models.config import McaModelConfig
from mca_lib.models.hybrid.pattern import ATTENTION, LATENT, MAMBA, MLP, MOE
from mca_lib.models.layout import ParallelSizes, expert_tensor_size
from mca_lib.models.pipeline import Chunk

_CHUNK = 64
"""Tokens of a chunk of `linear_attention.delta_rule`, which imports torch."""

WEIGHT_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Training:
    """How a model is trained, as far as memory depends on it."""

    precision: Literal["bf16", "fp32"] = "bf16"
    distributed_optimizer: bool = True
    sequence_length: int = 4096
    micro_batch_size: int = 1
    recompute: Literal["none", "selective", "full"] = "none"


def activation_bytes(
    config: McaModelConfig, layout: ParallelSizes, training: Training, stage: int, chunks: tuple[Chunk, ...]
) -> float:
    """Bytes that the stage holds at the height of its schedule."""
    element = WEIGHT_BYTES[training.precision]
    tokens = training.sequence_length * training.micro_batch_size / layout.context
    split = layout.tensor if layout.sequence_parallel else 1
    hidden = tokens * config.hidden_size / split * element
    per_chunk, largest = [], 0.0
    for chunk in chunks:
        layers = [tokens * _layer(config, layout, training, i) for i in chunk.layers]
        layers += [tokens * _layer(config, layout, training, config.num_layers - 1)] * chunk.mtp_layers
        largest = max([largest, *layers])
        per_chunk.append(hidden * len(layers) if training.recompute == "full" else sum(layers))
    held = sum(per_chunk) / len(chunks) * _in_flight(layout, stage, len(chunks))
    if training.recompute == "full":
        held += largest  # of the layer that is being computed again
    heads = sum(chunk.head + chunk.mtp_layers for chunk in chunks)
    # Input of the last norm and of the output layer; logits, and in fp32 their softmax.
    held += heads * (
        2 * hidden + tokens * padded_vocab_size(config.vocab_size, layout.tensor) / layout.tensor * (element + 4)
    )
    return held


def _in_flight(layout: ParallelSizes, stage: int, chunks: int) -> int:
    """Chunk passes whose backward pass is still to come: 1F1B, or its interleaved form (Narayanan et al. 2021, 2.2)."""
    if chunks == 1:
        return layout.pipeline - stage
    return 2 * (layout.pipeline - stage - 1) + (chunks - 1) * layout.pipeline + 1


def _layer(config: McaModelConfig, layout: ParallelSizes, training: Training, layer: int) -> float:
    """Bytes per token that a layer keeps for one micro batch."""
    split = layout.tensor if layout.sequence_parallel else 1
    element, kept = WEIGHT_BYTES[training.precision], 0.0
    for symbol in _parts_of(config, layer):
        norms = config.pre_norms + config.post_norms
        kept += element * 2 * norms * config.hidden_size / split  # a norm's input and output
        if layer in config.linear_attention_layers and symbol == ATTENTION:
            kept += _delta_net(config, layout, element)
        elif symbol in (ATTENTION, LATENT):
            kept += element * _attention(config, layout)
            if training.recompute == "none":
                kept += 4 * config.num_attention_heads / layout.tensor  # statistics of the softmax
        elif symbol == MLP:
            kept += element * 3 * config.ffn_hidden_size / layout.tensor  # gate, up, product
        elif symbol == MOE:
            kept += _experts(config, layout, element)
        elif symbol == MAMBA:
            kept += element * _mamba(config, layout)
    return kept


def _parts_of(config: McaModelConfig, layer: int) -> str:
    """Symbols of the layer's parts: a transformer's has two."""
    if config.hybrid is not None:
        return config.hybrid.pattern[layer]
    return ATTENTION + (MOE if layer in config.moe_layers else MLP)


def _experts(config: McaModelConfig, layout: ParallelSizes, element: int) -> float:
    """Bytes per token."""
    split = layout.tensor if layout.sequence_parallel else 1
    moe, tensor = config.moe, expert_tensor_size(layout)
    shared = element * 3 * (moe.shared_ffn_hidden_size or 0) / layout.tensor
    routed = element * moe.topk * tensor / split * (2 * config.hidden_size + 3 * moe.ffn_hidden_size / tensor)
    return shared + routed + 4 * moe.num_experts / split  # scores of the router


def _mamba(config: McaModelConfig, layout: ParallelSizes) -> float:
    """Elements per token: what is projected, the recurrence's output before and after its norm. Megatron's kernel
    computes the convolution again in the backward pass."""
    mamba = config.hybrid.mamba
    return (4 * mamba.inner_size + 2 * mamba.group_size + mamba.num_heads) / layout.tensor


def _delta_net(config: McaModelConfig, layout: ParallelSizes, element: int) -> float:
    """Bytes per token of a gated delta net: what is projected and what comes out before and after its norm; query and
    key for each value head, value, error and a chunk's share of the states in fp32 (`linear_attention.delta_rule`)."""
    net = config.gated_delta_net
    projected = 2 * net.key_size + 2 * net.value_size + 2 * net.num_value_heads
    in_heads = 2 * net.key_head_dim + 2 * net.value_head_dim + _CHUNK + net.key_head_dim * net.value_head_dim / _CHUNK
    kept = element * (projected + 2 * net.key_size + 3 * net.value_size) + 4 * net.num_value_heads * in_heads
    return kept / layout.tensor


def _attention(config: McaModelConfig, layout: ParallelSizes) -> float:
    """Elements per token: queries, keys, values and what comes out of them."""
    latent = config.latent_attention
    if latent is None:
        gate = config.query_size if config.attention_output_gate else 0
        return (2 * (config.query_size + config.kv_size) + 2 * gate) / layout.tensor
    heads = config.num_attention_heads / layout.tensor
    latents = (latent.q_lora_rank or 0) + latent.kv_lora_rank + latent.qk_rope_head_dim
    return 2 * latents + heads * 2 * (latent.qk_head_dim + latent.v_head_dim)
