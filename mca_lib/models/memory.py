"""What training all weights of a model takes of each rank's memory, by pipeline stage. No torch, nothing allocated.

Weights, gradients and optimizer state are those that the trainer's engine allocates, byte for byte: gradients are
reduced in fp32, bf16 weights have an fp32 copy, Adam has two fp32 moments; the distributed optimizer pads its buffers
and shares the optimizer state among replicas.

Activations are an estimate; see `activations`. A checkpoint is gathered beside all that: see `StageMemory.saving`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mca_lib.converter.mapping import TensorPlace
from mca_lib.converter.mappings import padded_vocab_size
from mca_lib.errors import ConfigError
from mca_lib.models.activations import WEIGHT_BYTES, Training, activation_bytes
from mca_lib.models.config import McaModelConfig
from mca_lib.models.layout import ParallelSizes, expert_tensor_size, rank_problems, size_problems
from mca_lib.models.layout_rules import chunks_of
from mca_lib.models.pipeline import Chunk
from mca_lib.models.registry import weights_family
from mca_lib.models.size import rows_held

_GRADIENT_BYTES, _MOMENTS_BYTES, _COPY_BYTES = 4, 8, {"bf16": 4, "fp32": 0}
_ALIGNMENT, _BUCKET = 64, 128
"""Elements: a parameter begins at a multiple of the first, a bucket ends at one of the second and of the replicas
(megatron-core 0.19.2, `optimizer/param_layout.py`)."""


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
    saving: int
    """Of main memory, on top of `total` while a checkpoint is gathered."""

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
    parameters = weights = gradients = optimizer = saving = 0
    for chunk in chunks:
        tensors = list(chunk_tensors(config, layout, chunk))
        parameters += sum(t.elements * t.count for t in tensors)
        weights += sum(4 * t.elements * t.count for t in tensors if not t.trained)  # kept in fp32
        for expert, shared_by in ((False, replicas), (True, expert_replicas)):
            held = [t for t in tensors if t.expert == expert and t.trained]
            elements = sum(t.elements * t.count for t in held)
            buffer = _padded(held, shared_by) if training.distributed_optimizer else elements
            weights += WEIGHT_BYTES[training.precision] * buffer
            gradients += _GRADIENT_BYTES * buffer
            optimizer += -(-state * elements // shared_by) if training.distributed_optimizer else state * elements
            saving += _saved(elements, shared_by, training)
    return StageMemory(
        stage=stage,
        layers=sum(len(chunk.layers) for chunk in chunks),
        parameters=parameters,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=round(activation_bytes(config, layout, training, stage, chunks)),
        saving=saving,
    )


def _saved(elements: int, replicas: int, training: Training) -> int:
    """Bytes while a checkpoint of these weights is gathered and copied.

    The distributed optimizer's is gathered whole on every rank, in fp32 (megatron-core 0.19.2,
    `get_parameter_state_dp_zero`): masters and moments, a rank's own share of them, and three times one of the three on
    its way. Then weights, masters and moments are copied, so that training can go on.
    """
    weight = WEIGHT_BYTES[training.precision]
    if not training.distributed_optimizer:
        return (weight + _MOMENTS_BYTES + _COPY_BYTES[training.precision]) * elements
    whole, one = _MOMENTS_BYTES + 4, 4
    gathered = whole * elements + -(-whole * elements // replicas) + 3 * one * elements
    return max(gathered, (2 * whole + weight) * elements)


def _padded(tensors: list[Tensors], replicas: int) -> int:
    """Elements of the distributed optimizer's buffer."""
    bucket = math.lcm(replicas, _BUCKET)
    buckets = [[t for t in tensors if not t.alone], *([t] for t in tensors if t.alone)]
    sums = [sum(_up(t.elements, _ALIGNMENT) * t.count for t in held) for held in buckets]
    return sum(_up(total, bucket) for total in sums)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
