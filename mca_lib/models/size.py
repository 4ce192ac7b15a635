"""How many parameters a model has, in each of its parts, over all or on one rank. No torch, nothing allocated.

Counted from the weight table of the family, which is also what a conversion fills: the figures are those of the
model that is built. The biases that balance experts count as `router`, though no gradient reaches them.

    vision embedding attention mamba mlp experts shared_experts router norms head mtp
"""

import math
from collections.abc import Iterator
from operator import attrgetter

from mca_lib.converter.mapping import Mapping, TensorPlace
from mca_lib.converter.mappings import Vocabulary, padded_vocab_size
from mca_lib.models.config import McaModelConfig
from mca_lib.models.layout import ParallelSizes, expert_tensor_size
from mca_lib.models.layout_rules import chunks_of
from mca_lib.models.pipeline import Chunk
from mca_lib.models.registry import weights_family

_PARTS = (
    # The first that a name contains; a norm is a norm wherever it stands.
    ("vision", "vision_model."),
    ("mtp", "{mtp}"),
    ("norms", "norm"),
    ("embedding", "embedding."),
    ("head", "output_layer."),
    ("attention", ".self_attention."),
    ("mamba", ".mixer."),
    ("router", ".router."),
    ("shared_experts", ".shared_experts."),
    ("experts", ".experts."),
    ("mlp", ".mlp."),
)

PARTS = (
    *("vision", "embedding", "attention", "mamba", "mlp", "experts", "shared_experts", "router", "norms", "head"),
    "mtp",
)


def parts(config: McaModelConfig) -> dict[str, int]:
    """Parameters of the whole model by part, without padding; a tied output layer counts once, as embedding."""
    counts = dict.fromkeys(PARTS, 0)
    for row in weights_family(config).mappings(config):
        counts[_part(row)] += sum(math.prod(s) for s in row.hf_shapes(config)) * _copies(row, config)
    return counts


def total(config: McaModelConfig) -> int:
    """Parameters of the whole model, multi-token prediction layers included."""
    return sum(parts(config).values())


def active(config: McaModelConfig) -> int:
    """Parameters that a token meets on its way to the logits: `topk` of the experts, no multi-token prediction."""
    counts = parts(config)
    if config.moe is not None:
        counts["experts"] = counts["experts"] * config.moe.topk // config.moe.num_experts
    return sum(counts.values()) - counts["mtp"]


def local_parts(
    config: McaModelConfig,
    layout: ParallelSizes,
    pipeline_rank: int,
    tensor_rank: int = 0,
    expert_tensor_rank: int = 0,
) -> dict[str, int]:
    """Parameters that one rank allocates, by part, at a layout that `check_config_layout` accepts.

    The vocabulary is padded here. A tied output layer on another rank than the embedding is a copy of it (`head`), and
    so is the embedding that multi-token prediction layers bring to their rank (`embedding`).
    """
    counts = dict.fromkeys(PARTS, 0)
    place = TensorPlace(tensor_rank, layout.tensor, expert_tensor_rank, expert_tensor_size(layout))
    chunks = chunks_of(config, layout)[pipeline_rank]
    for row in weights_family(config).mappings(config):
        shape = row.local_shape(config, *place.of(row))
        experts = config.moe.num_experts // layout.expert if row.per_expert else 1
        counts[_part(row)] += math.prod(shape) * experts * sum(rows_held(row, config, chunk) for chunk in chunks)
    vocabulary = padded_vocab_size(config.vocab_size, layout.tensor) // layout.tensor * config.hidden_size
    for chunk in chunks:
        if chunk.mtp_layers and not chunk.embedding:
            counts["embedding"] += vocabulary
        if chunk.head and config.tie_word_embeddings and not chunk.embedding:
            counts["head"] += vocabulary
    return counts


def _part(row: Mapping) -> str:
    for part, marker in _PARTS:
        if marker in row.mca:
            return part
    raise ValueError(f"no part of the model is known for {row.mca}")


def _copies(row: Mapping, config: McaModelConfig) -> int:
    """Tensors that a row stands for."""
    experts = config.moe.num_experts if row.per_expert else 1
    return experts * len(list(_layers(row, config)))


def _layers(row: Mapping, config: McaModelConfig) -> Iterator[int]:
    """Numbers of the layers that have the row, once 0 for a row outside of layers."""
    if "{mtp}" in row.mca:
        yield from range(config.mtp_num_layers)
    elif "{layer}" in row.mca:
        yield from range(config.num_layers) if row.layers is None else attrgetter(row.layers)(config)
    else:
        yield 0


def rows_held(row: Mapping, config: McaModelConfig, chunk: Chunk) -> int:
    """How often a chunk has the row, experts not counted."""
    if "{mtp}" in row.mca:
        return chunk.mtp_layers
    if "{layer}" in row.mca:
        return sum(layer in chunk.layers for layer in _layers(row, config))
    if row.mca.startswith("vision_model.") or (isinstance(row, Vocabulary) and "embedding" in row.mca):
        return int(chunk.embedding)
    return int(chunk.head)
