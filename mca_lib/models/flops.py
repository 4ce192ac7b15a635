"""Floating point operations of a model. No torch.

A matrix product [m, k] x [k, n] counts 2·m·n·k; norms, activations, softmax and rope are left out. A forward pass over
T tokens in sequences of S:

    T · 2 · W                                       W: elements of all matrices that a token is multiplied with
    + T/S · Σ layers 2 · N · (Dqk + Dv) · pairs     N heads, of which scores take Dqk channels and values Dv
      pairs = Σ i=1..S min(i, window)               keys that the queries of a sequence see
    + T · Σ Mamba layers (4 · D · N + 2 · k · (D + 2·G·N))
    + T · Σ gated delta nets (6 · H · K · V + 2 · k · (2·Q + H·V))

A gated delta net reads its H states of K x V under the key, writes to them and reads them under the query with 2·K·V
operations each; k taps over queries and keys of Q channels, and over the values. The line before is Mamba-2's
recurrence (https://arxiv.org/abs/2405.21060, equation 16) and its convolution: D inner channels, of which each writes a
state of N with 2·D·N operations and reads it with as many; k taps over x and over the G groups' B and C.
Kernels that take many tokens at once do more, and sequences may be of any length.

W counts `topk` experts of each layer, the output layer also where it is tied, and not the embedding, which is a
look-up. The backward pass is twice the forward pass: each product has one for either factor's gradient. With adapters
the frozen matrices have no gradient of their own, and their products count once in the backward pass; so do those of
weights that `freeze` names. Recomputation is not counted: these are the operations that the model needs, the numerator
of model FLOPs utilization. Nor is a vision tower, whose operations depend on the images.
"""

import math
from collections import Counter
from collections.abc import Collection
from operator import attrgetter

import numpy as np

from mca_lib.converter.plan import entries
from mca_lib.models.config import McaModelConfig
from mca_lib.models.registry import weights_family


def training_flops(config: McaModelConfig, tokens: int, sequence_length: int) -> int:
    """Forward and backward pass of a training step, multi-token prediction included."""
    return 3 * forward_flops(config, tokens, sequence_length, mtp=True)


def step_flops(
    config: McaModelConfig, lengths_D: np.ndarray, adapter_elements: int | None = None, frozen: int = 0
) -> int:
    """Forward and backward pass of a training step over documents that do not see each other.

    Args:
        lengths_D: tokens of each document; padding is none.
        adapter_elements: of the matrices of adapters, as often as a token is multiplied with them; None where all
            weights are trained, multi-token prediction layers included.
        frozen: `frozen_elements` of a training without adapters.
    """
    mtp = adapter_elements is None
    pairs = int(attention_pairs(config, lengths_D.astype(np.int64), mtp).sum())
    elements = matrix_elements(config, mtp)
    products = 3 * elements - frozen if adapter_elements is None else 2 * elements + 3 * adapter_elements
    others = 3 * (attention_flops_per_pair(config) * pairs + recurrent_flops_per_token(config) * int(lengths_D.sum()))
    return 2 * products * int(lengths_D.sum()) + others


def forward_flops(config: McaModelConfig, tokens: int, sequence_length: int, mtp: bool = False) -> int:
    """Forward pass from token ids to logits; `mtp` adds the multi-token prediction layers and their logits.

    Args:
        tokens: of all sequences together.
        sequence_length: of each, for packed rows of each document.
    """
    pairs = attention_pairs(config, sequence_length, mtp)
    attention = attention_flops_per_pair(config) * pairs * tokens // sequence_length
    return (2 * matrix_elements(config, mtp) + recurrent_flops_per_token(config)) * tokens + attention


def matrix_elements(config: McaModelConfig, mtp: bool = False) -> int:
    """Elements of the matrices that a token is multiplied with, each as often as that happens."""
    elements = 0
    for row in weights_family(config).mappings(config):
        if "{mtp}" in row.mca:
            times = config.mtp_num_layers if mtp else 0
        elif "{layer}" in row.mca:
            times = config.num_layers if row.layers is None else len(attrgetter(row.layers)(config))
        else:
            continue  # embedding, last norm, output layer
        if not times:
            continue  # the config may not have its sizes
        if row.per_expert:
            times *= config.moe.topk
        elements += times * sum(math.prod(shape) for shape in row.hf_shapes(config) if len(shape) == 2)
    heads = 1 + (config.mtp_num_layers if mtp else 0)
    return elements + heads * config.vocab_size * config.hidden_size


def frozen_elements(config: McaModelConfig, frozen: Collection[str]) -> int:
    """Of `matrix_elements` with multi-token prediction, those of the frozen weights, named as in the checkpoint.

    Experts count as if all had equal shares of the tokens.
    """
    chosen = Counter(entry.mapping for entry in entries(config) if entry.mca in frozen and "layers." in entry.mca)
    elements = 0
    for row, count in chosen.items():
        product = count * sum(math.prod(shape) for shape in row.hf_shapes(config) if len(shape) == 2)
        elements += product * config.moe.topk // config.moe.num_experts if row.per_expert else product
    head = "embedding.word_embeddings.weight" if config.tie_word_embeddings else "output_layer.weight"
    heads = 1 + config.mtp_num_layers if head in frozen else 0
    return elements + heads * config.vocab_size * config.hidden_size


def mamba_flops_per_token(config: McaModelConfig) -> int:
    """Operations of all Mamba layers for one token, without their projections, which are among `matrix_elements`."""
    if config.hybrid is None or config.hybrid.mamba is None:
        return 0
    mamba = config.hybrid.mamba
    recurrence = 4 * mamba.inner_size * mamba.state_size
    convolution = 2 * mamba.conv_kernel * (mamba.inner_size + 2 * mamba.group_size)
    return len(config.mamba_layers) * (recurrence + convolution)


def delta_net_flops_per_token(config: McaModelConfig) -> int:
    """Operations of all gated delta nets for one token, without their projections."""
    net = config.gated_delta_net
    if net is None:
        return 0
    recurrence = 6 * net.num_value_heads * net.key_head_dim * net.value_head_dim
    convolution = 2 * net.conv_kernel * (2 * net.key_size + net.value_size)
    return len(net.layers) * (recurrence + convolution)


def recurrent_flops_per_token(config: McaModelConfig) -> int:
    """Operations of the layers whose state goes from token to token, without their projections."""
    return mamba_flops_per_token(config) + delta_net_flops_per_token(config)


def attention_flops_per_pair(config: McaModelConfig) -> int:
    """Operations of one layer for one query and one key that it sees."""
    latent = config.latent_attention
    channels = 2 * config.kv_channels if latent is None else latent.qk_head_dim + latent.v_head_dim
    return 2 * config.num_attention_heads * channels


def attention_pairs[Lengths: (int, np.ndarray)](
    config: McaModelConfig, sequence_length: Lengths, mtp: bool = False
) -> Lengths:
    """Pairs of a query and a key that it sees, over all layers; in one sequence, or in each of several."""
    full = sequence_length * (sequence_length + 1) // 2
    window = np.minimum(config.sliding_window or sequence_length, sequence_length)
    windowed = window * (window + 1) // 2 + (sequence_length - window) * window
    layers = len(config.attention_layers) + (config.mtp_num_layers if mtp else 0)
    full_layers = len(config.full_attention_layers) if config.sliding_window else layers
    return full * full_layers + windowed * (layers - full_layers)
