"""Which layers each pipeline rank holds. No torch.

A rank holds one chunk of the model, or with an interleaved schedule several; in the order of the model, chunk 0 of
every rank comes first, then chunk 1 of every rank:

    8 layers, pipeline 2, virtual_pipeline 2          rank 0: 0 1 | 4 5     rank 1: 2 3 | 6 7

Sizes come from one of three: equal shares; `first_stage_layers` and `last_stage_layers`, and equal shares between;
or `pipeline_layout`, Megatron's notation of the chunks in the order of the model:

    E embedding   t layer   m multi-token prediction layer   L output layer and loss
    | ends a chunk   x*n is x n times   (…)*n is … n times   commas are for the eye

    Et*3|t*5|t*5|t*3L          4 chunks: pipeline 4, or pipeline 2 with virtual_pipeline 2

A hybrid model's `pipeline_layout` is its pattern with | between the chunks instead: M*-|*-M*-.
"""

import re
from dataclasses import dataclass

from mca_lib.errors import ConfigError
from mca_lib.models.hybrid.pattern import PIPE, parse_pattern
from mca_lib.models.layout import ParallelSizes, virtual_stages

_UNROLL = (re.compile(r"\(([^)]+)\)\*(\d{1,4})"), re.compile(r"(.)\*(\d{1,4})"))


@dataclass(frozen=True)
class Chunk:
    """What one model chunk holds."""

    layers: range
    """Numbers of its layers, counted from 0 over the model."""
    embedding: bool = False
    """The embedding, at the start."""
    mtp_layers: int = 0
    head: bool = False
    """The last norm and the output layer."""


def pipeline_chunks(
    num_layers: int, mtp_num_layers: int, layout: ParallelSizes, pattern: str | None = None
) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of each pipeline rank. Raises ConfigError naming the recipe's fields that do not fit the model.

    Args:
        pattern: the layers of a hybrid model.
    """
    ranks, chunks = layout.pipeline, virtual_stages(layout) or 1
    if chunks > 1 and ranks == 1:
        raise ConfigError(f"parallel.virtual_pipeline={chunks} needs parallel.pipeline > 1")
    if layout.pipeline_layout is not None:
        sizes = _custom_sizes(num_layers, mtp_num_layers, layout, pattern)
    else:
        sizes = [n // chunks for n in _rank_sizes(num_layers, layout, pattern)] * chunks
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    last = len(sizes) - 1
    in_order = [
        Chunk(range(start, start + size), i == 0, mtp_num_layers if i == last else 0, i == last)
        for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    return tuple(tuple(in_order[rank::ranks]) for rank in range(ranks))


def megatron_split(layout: ParallelSizes) -> dict[str, int | str | None]:
    """The fields of Megatron's config that split the layers unevenly.

    Where two ranks both have a size, one of them is enough: with both, Megatron divides by the number of ranks
    between (megatron-core 0.19.2, `get_transformer_layer_offset` with an interleaved schedule).
    """
    first, last = layout.first_stage_layers, layout.last_stage_layers
    both = layout.pipeline == 2 and first is not None
    return {
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": None if both else last,
        "pipeline_model_parallel_layout": layout.pipeline_layout and "|".join(parse_layout(layout.pipeline_layout)),
    }


def hybrid_split(chunks: tuple[tuple[Chunk, ...], ...]) -> dict[str, str | None]:
    """`megatron_split` of a hybrid model. Its chunks are written out, so that Megatron's own rules for equal shares,
    which differ from one of its classes to another, have no say."""
    if len(chunks) == 1:
        return {"pipeline_model_parallel_layout": None}
    in_order = [chunk for stage in zip(*chunks, strict=True) for chunk in stage]
    parts = ["E" * chunk.embedding + "t" * len(chunk.layers) + "L" * chunk.head for chunk in in_order]
    return {"pipeline_model_parallel_layout": "|".join(parts)}


def _rank_sizes(num_layers: int, layout: ParallelSizes, pattern: str | None) -> list[int]:
    """Layers of each pipeline rank, without a custom layout."""
    ranks, chunks = layout.pipeline, virtual_stages(layout) or 1
    first, last = layout.first_stage_layers, layout.last_stage_layers
    given = {"first_stage_layers": first, "last_stage_layers": last}
    given = {f"parallel.{name}": n for name, n in given.items() if n is not None}
    if given and ranks == 1:
        raise ConfigError(f"{next(iter(given))} needs parallel.pipeline > 1")
    for name, n in given.items():
        if n < 1 or n % chunks:
            raise ConfigError(f"{name}={n} does not divide by parallel.virtual_pipeline={chunks}")
    middle_ranks, middle = ranks - len(given), num_layers - sum(given.values())
    said = ", ".join(f"{name}={n}" for name, n in given.items())
    if middle_ranks == 0:
        if middle:
            raise ConfigError(f"{said} do not add up to the model's {num_layers} layers")
        return [first, last]
    if middle < middle_ranks or middle % (middle_ranks * chunks):
        if given:
            raise ConfigError(
                f"{said} leave {middle} of the model's {num_layers} layers, which do not divide by the other "
                f"{middle_ranks} ranks of parallel.pipeline"
                + (f" x parallel.virtual_pipeline={chunks}" if chunks > 1 else "")
                + "; change them, or write parallel.pipeline_layout"
            )
        raise ConfigError(_uneven(num_layers, ranks, chunks, pattern))
    share = middle // middle_ranks
    return [
        *([first] if first is not None else []),
        *[share] * middle_ranks,
        *([last] if last is not None else []),
    ]


def _uneven(num_layers: int, ranks: int, chunks: int, pattern: str | None) -> str:
    """Why equal shares fail, and what could be done instead."""
    stages = ranks * chunks
    name = "parallel.pipeline" if chunks == 1 else "parallel.pipeline x parallel.virtual_pipeline"
    divisors = [d for d in range(1, num_layers + 1) if num_layers % d == 0]
    message = f"{name}={stages} does not divide the model's {num_layers} layers; use one of {divisors}"
    if num_layers < stages:
        return message
    # Ranks of equal shares, rounded up to whole chunks, and a last rank with what is left.
    share = -(-num_layers // stages) * chunks
    left = num_layers - share * (ranks - 1)
    if left > 0 and left % chunks == 0:
        return f"{message}, or set parallel.last_stage_layers: {left}"
    proposed = proposed_pattern(pattern, stages) if pattern else proposed_layout(num_layers, stages)
    return f"{message}, or write parallel.pipeline_layout: {proposed}"


def proposed_layout(num_layers: int, stages: int, mtp_num_layers: int = 0) -> str:
    """A pipeline layout with the layers spread as evenly as they go, the smaller chunks first and last."""
    parts = [f"t*{n}" if n > 1 else "t" * n for n in _spread(num_layers, stages)]
    return "E" + "|".join(parts) + "m" * mtp_num_layers + "L"


def proposed_pattern(pattern: str, stages: int) -> str:
    """`proposed_layout` of a hybrid model."""
    sizes = _spread(len(pattern), stages)
    ends = [sum(sizes[: i + 1]) for i in range(stages)]
    return PIPE.join(pattern[end - size : end] for size, end in zip(sizes, ends, strict=True))


def _spread(num_layers: int, stages: int) -> list[int]:
    base, more = divmod(num_layers, stages)
    start = (stages - more) // 2
    return [base + (start <= i < start + more) for i in range(stages)]


def _custom_sizes(num_layers: int, mtp_num_layers: int, layout: ParallelSizes, pattern: str | None) -> list[int]:
    """Layers of each chunk, in the order of the model, of a custom layout."""
    text, field = layout.pipeline_layout, f"parallel.pipeline_layout={layout.pipeline_layout!r}"
    if layout.first_stage_layers is not None or layout.last_stage_layers is not None:
        raise ConfigError(f"{field} cannot go with parallel.first_stage_layers or parallel.last_stage_layers; keep one")
    parts = parse_layout(text) if pattern is None else _segments(text, pattern)
    ranks, chunks = layout.pipeline, virtual_stages(layout) or 1
    if ranks == 1:
        raise ConfigError(f"{field} needs parallel.pipeline > 1")
    if len(parts) != ranks * chunks:
        hint = "it must have parallel.pipeline x parallel.virtual_pipeline"
        if len(parts) % ranks == 0:
            hint = f"set parallel.virtual_pipeline: {len(parts) // ranks}"
        raise ConfigError(
            f"{field} has {len(parts)} chunks, and parallel.pipeline={ranks} x parallel.virtual_pipeline={chunks} is "
            f"{ranks * chunks}; {hint}"
        )
    if pattern is not None:
        return [len(part) for part in parts]
    whole = "".join(parts)
    order = "E" + "t" * num_layers + "m" * mtp_num_layers + "L"
    if whole != order or not parts[0].startswith("E") or not parts[-1].endswith("m" * mtp_num_layers + "L"):
        mtp = f", {mtp_num_layers} m" if mtp_num_layers else ""
        raise ConfigError(
            f"{field} must hold E, {num_layers} t{mtp} and L in this order, E in the first chunk and "
            f"{'m and ' if mtp else ''}L in the last one, as "
            f"{proposed_layout(num_layers, ranks * chunks, mtp_num_layers)}"
        )
    return [part.count("t") for part in parts]


def _segments(text: str, pattern: str) -> list[str]:
    """The chunks of a hybrid model's layout. Raises ConfigError where it has other layers than the model."""
    parsed = parse_pattern(text, "parallel.pipeline_layout")
    if parsed.layers != pattern:
        raise ConfigError(
            f"parallel.pipeline_layout={text!r} has other layers than the model, whose pattern is {pattern!r}; write "
            f"that, with {PIPE} between the chunks"
        )
    return list(parsed.segments)


def parse_layout(text: str) -> list[str]:
    """The chunks of a layout, written out: `E`, `t`, `m`, `L`. Raises ConfigError for any other character."""
    written = re.sub(r"[,\s]", "", text)
    for pattern in _UNROLL:
        written = pattern.sub(lambda match: match[1] * int(match[2]), written)
    if odd := sorted(set(written) - set("EtmL|")):
        raise ConfigError(
            f"parallel.pipeline_layout={text!r} has {odd[0]!r}; it is made of E, t, m, L, | and *, as Et*3|t*4L"
        )
    return written.split("|")
