"""What training all weights of a model takes of each rank's memory, by pipeline stage. No torch, nothing allocated.

Weights, gradients and optimizer state are those that the trainer's engine allocates, byte for byte: gradients are
reduced in fp32, bf16 weights have an fp32 copy, Adam has two fp32 moments; the distributed optimizer pads its buffers
and shares the optimizer state among replicas.

Activations are an estimate in the manner of Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198, section 4): what
the backward pass of each operation needs is added up. Their layer keeps s·b·h·(34 + 5·a·s/h) bytes; here the terms are
those of this architecture: SwiGLU, grouped queries, no dropout, attention that does not keep the s × s scores
(FlashAttention, SDPA), experts that receive equal shares of the tokens. What the C library keeps of freed memory is not
counted: on CPU up to a fifth on top (`mca_lib.heap`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mca_lib.converter.mappings import TensorPlace, padded_vocab_size
from mca_lib.errors import ConfigError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.layout import ParallelSizes, expert_tensor_size, rank_problems, size_problems
from mca_lib.models.layout_rules import chunks_of
from mca_lib.models.pipeline import Chunk
from mca_lib.models.registry import weights_family
from mca_lib.models.size import rows_held

_WEIGHT_BYTES = {"bf16": 2, "fp32": 4}
_GRADIENT_BYTES, _MOMENTS_BYTES, _COPY_BYTES = 4, 8, {"bf16": 4, "fp32": 0}
_ALIGNMENT, _BUCKET = 64, 128
"""Elements: a parameter begins at a multiple of the first, a bucket ends at one of the second and of the replicas
(megatron-core 0.19.2, `optimizer/param_layout.py`)."""


@dataclass(frozen=True)
class Training:
    """How a model is trained, as far as memory depends on it."""

    precision: Literal["bf16", "fp32"] = "bf16"
    distributed_optimizer: bool = True
    sequence_length: int = 4096
    micro_batch_size: int = 1
    recompute: Literal["none", "selective", "full"] = "none"


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each rank of one pipeline stage."""

    stage: int
    layers: int
    parameters: int
    """Elements."""
    weights: int
    gradients: int
    optimizer: int
    """With the distributed optimizer the mean over the replicas that share it; they differ by where padding falls."""
    activations: int
    """An estimate."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


class Tensors(NamedTuple):
    """`count` tensors of `elements` each."""

    elements: int
    count: int
    expert: bool = False
    alone: bool = False
    """A tied embedding that two stages hold has a bucket of its own."""
    trained: bool = True


def stage_memory(
    config: McaModelConfig, layout: ParallelSizes, training: Training, ranks: int
) -> tuple[StageMemory, ...]:
    """Of every pipeline stage. Raises ConfigError when `ranks` cannot be laid out so."""
    for problem in (*size_problems(layout), *rank_problems(layout, ranks)):
        raise ConfigError(problem)
    chunks = chunks_of(config, layout)
    return tuple(_stage(config, layout, training, ranks, stage, chunks[stage]) for stage in range(layout.pipeline))


def chunk_tensors(config: McaModelConfig, layout: ParallelSizes, chunk: Chunk) -> Iterator[Tensors]:
    """What a model chunk allocates on each of its ranks."""
    place = TensorPlace(0, layout.tensor, 0, expert_tensor_size(layout))
    shared = config.tie_word_embeddings and layout.pipeline > 1
    for row in weights_family(config).mappings(config):
        count = rows_held(row, config, chunk) * (config.moe.num_experts // layout.expert if row.per_expert else 1)
        if count:
            alone = shared and row.mca == "embedding.word_embeddings.weight"
            elements = math.prod(row.local_shape(config, *place.of(row)))
            yield Tensors(elements, count, row.per_expert, alone, not row.mca.endswith("expert_bias"))
    vocabulary = padded_vocab_size(config.vocab_size, layout.tensor) // layout.tensor * config.hidden_size
    if chunk.mtp_layers and not chunk.embedding:
        yield Tensors(vocabulary, 1, alone=True)
    if chunk.head and config.tie_word_embeddings and not chunk.embedding:
        yield Tensors(vocabulary, 1, alone=shared)


def _stage(
    config: McaModelConfig,
    layout: ParallelSizes,
    training: Training,
    ranks: int,
    stage: int,
    chunks: tuple[Chunk, ...],
) -> StageMemory:
    replicas = ranks // (layout.tensor * layout.pipeline)
    expert_replicas = ranks // (expert_tensor_size(layout) * layout.expert * layout.pipeline)
    state = _MOMENTS_BYTES + _COPY_BYTES[training.precision]
    parameters = weights = gradients = optimizer = 0
    for chunk in chunks:
        tensors = list(chunk_tensors(config, layout, chunk))
        parameters += sum(t.elements * t.count for t in tensors)
        weights += sum(4 * t.elements * t.count for t in tensors if not t.trained)  # kept in fp32
        for expert, shared_by in ((False, replicas), (True, expert_replicas)):
            held = [t for t in tensors if t.expert == expert and t.trained]
            elements = sum(t.elements * t.count for t in held)
            buffer = _padded(held, shared_by) if training.distributed_optimizer else elements
            weights += _WEIGHT_BYTES[training.precision] * buffer
            gradients += _GRADIENT_BYTES * buffer
            optimizer += -(-state * elements // shared_by) if training.distributed_optimizer else state * elements
    return StageMemory(
        stage=stage,
        layers=sum(len(chunk.layers) for chunk in chunks),
        parameters=parameters,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=round(_activations(config, layout, training, stage, chunks)),
    )


def _padded(tensors: list[Tensors], replicas: int) -> int:
    """Elements of the distributed optimizer's buffer."""
    bucket = math.lcm(replicas, _BUCKET)
    buckets = [[t for t in tensors if not t.alone], *([t] for t in tensors if t.alone)]
    sums = [sum(_up(t.elements, _ALIGNMENT) * t.count for t in held) for held in buckets]
    return sum(_up(total, bucket) for total in sums)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _activations(
    config: McaModelConfig, layout: ParallelSizes, training: Training, stage: int, chunks: tuple[Chunk, ...]
) -> float:
    """Bytes that the stage holds at the height of its schedule."""
    element = _WEIGHT_BYTES[training.precision]
    tokens = training.sequence_length * training.micro_batch_size / layout.context
    split = layout.tensor if layout.sequence_parallel else 1
    moe = set(config.moe_layers)
    hidden = tokens * config.hidden_size / split * element
    per_chunk, largest = [], 0.0
    for chunk in chunks:
        layers = [_layer(config, layout, training, tokens, i in moe) for i in chunk.layers]
        layers += [_layer(config, layout, training, tokens, bool(moe))] * chunk.mtp_layers
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


def _layer(config: McaModelConfig, layout: ParallelSizes, training: Training, tokens: float, experts: bool) -> float:
    """Bytes that one layer keeps for one micro batch."""
    split = layout.tensor if layout.sequence_parallel else 1
    element = _WEIGHT_BYTES[training.precision]
    own = 4 * config.hidden_size / split  # both norms' inputs and outputs
    per_token = element * (own + _attention(config, layout))
    if training.recompute == "none":
        per_token += 4 * config.num_attention_heads / layout.tensor  # statistics of the softmax
    if not experts:
        return tokens * (per_token + element * 3 * config.ffn_hidden_size / layout.tensor)  # gate, up, product
    moe, tensor = config.moe, expert_tensor_size(layout)
    per_token += element * 3 * (moe.shared_ffn_hidden_size or 0) / layout.tensor
    per_token += 4 * moe.num_experts / split  # scores of the router
    routed = moe.topk * tensor / split
    return tokens * (per_token + element * routed * (2 * config.hidden_size + 3 * moe.ffn_hidden_size / tensor))


def _attention(config: McaModelConfig, layout: ParallelSizes) -> float:
    """Elements per token: queries, keys, values and what comes out of them."""
    latent = config.latent_attention
    if latent is None:
        return 2 * (config.query_size + config.kv_size) / layout.tensor
    heads = config.num_attention_heads / layout.tensor
    latents = (latent.q_lora_rank or 0) + latent.kv_lora_rank + latent.qk_rope_head_dim
    return 2 * latents + heads * 2 * (latent.qk_head_dim + latent.v_head_dim)
