"""The section of a recipe that says which Megatron-Core checkpoint training starts from.

kind: gpt       stage *convert*: the transformer as it is
kind: hybrid    stage *translate*: its layers at the `*` and `-` (or `E`) of a pattern, fresh Mamba layers at every `M`
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveInt

from mca_lib.errors import ConfigError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.hybrid.pattern import model_pattern
from mca_lib.models.hybrid.sizes import hybrid_layers
from tasks.section import Section


class MambaConfig(Section):
    """Sizes of the Mamba-2 layers of a hybrid; what is left out follows from the model."""

    num_heads: PositiveInt | None = None
    """Heads; by default the inner size, twice the model's hidden size, over `head_dim`."""
    head_dim: PositiveInt | None = None
    """Channels of a head; by default 64, or what follows from `num_heads`."""
    state_size: PositiveInt | None = None
    """Size of a channel's state; by default 128."""
    num_groups: PositiveInt | None = None
    """Groups of heads that share B and C; by default 1. Tensor parallel sizes must divide it."""
    conv_kernel: PositiveInt | None = None
    """Tokens that the convolution sees; by default 4."""
    chunk_size: PositiveInt | None = None
    """Tokens that a kernel takes at once; by default 128. It changes the result by rounding alone."""


class CheckpointConfig(Section):
    """The Megatron-Core checkpoint that training starts from."""

    kind: Literal["gpt", "hybrid"] = "gpt"
    """`gpt`: a transformer; `hybrid`: attention, MLP and Mamba layers by a pattern."""
    resize_vocabulary: bool = False
    """Add rows to embedding and output layer where the tokenizer has more tokens than the model; never shrinks."""
    max_logits_difference: float | None = Field(default=1e-3, gt=0)
    """Largest |Δ| of fp32 logits against transformers that the stage accepts; null: unchecked, for a model whose fp32
    weights do not fit into memory twice. Of a hybrid, it is those that it has without its fresh layers' output."""
    pattern: str | None = None
    """Layers of a hybrid, one symbol each: `M` Mamba-2, `*` attention, `-` MLP, `E` experts. `mcaflow hybrid-pattern`
    prints one."""
    fresh_layers: Literal["random", "zero_output"] = "random"
    """How Mamba layers begin: at random; or adding nothing, so that the hybrid computes what the transformer does."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of the fresh layers' random weights."""
    mamba: MambaConfig = MambaConfig()
    """Sizes of a hybrid's Mamba layers."""


HYBRID_ALONE = ("pattern", "fresh_layers", "seed", "mamba")
"""Fields of the section that a transformer has no use for."""


def checkpoint_problems(checkpoint: CheckpointConfig) -> Iterator[str]:
    """What in the section does not go together, whatever the model is: `field: reason`."""
    if checkpoint.kind == "gpt":
        for name in HYBRID_ALONE:
            if getattr(checkpoint, name) != CheckpointConfig.model_fields[name].default:
                yield (
                    f"checkpoint.{name}: is for hybrids, and checkpoint.kind is gpt; set checkpoint.kind: hybrid, or "
                    "leave it out"
                )
        return
    try:
        model_pattern(checkpoint.pattern, "checkpoint.pattern")
    except ConfigError as error:
        yield str(error)


def starting_model(transformer: McaModelConfig, checkpoint: CheckpointConfig) -> McaModelConfig:
    """The model that training starts from: the transformer, or the hybrid that is made of it.

    Raises ConfigError, naming `checkpoint.pattern` or `checkpoint.mamba`, for a hybrid that cannot be made of it.
    """
    if checkpoint.kind == "gpt":
        return transformer
    pattern = model_pattern(checkpoint.pattern, "checkpoint.pattern")
    sizes = checkpoint.mamba.model_dump()
    hybrid = hybrid_layers(pattern, transformer.hidden_size, sizes, "checkpoint.mamba.")
    return transformer.with_hybrid(hybrid, "checkpoint.pattern")
