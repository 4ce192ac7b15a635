"""Stage *convert*: Hugging Face weights become a Megatron-Core checkpoint that loads at any parallel layout."""

from typing import Literal

from pydantic import Field

from tasks.section import Section


class CheckpointConfig(Section):
    """The Megatron-Core checkpoint that training starts from."""

    kind: Literal["gpt", "hybrid"] = "gpt"
    """`gpt`: a transformer; `hybrid`: attention, MLP and Mamba layers by a pattern."""
    max_logits_difference: float = Field(default=1e-3, gt=0)
    """Largest |Δ| of fp32 logits against transformers that the stage accepts."""
