"""Stage *evaluate*: the base model and the trained one on held-out rows."""

from typing import Literal

from pydantic import Field, PositiveInt

from tasks.section import Execution, Section


class EvalConfig(Section):
    """What is measured at the end."""

    max_rows: PositiveInt | None = None
    """Held-out rows to use; null for all."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    prompts: list[str] = Field(default_factory=list)
    """Prompts of the sample generations; without any, the first held-out prompts."""
    num_samples: int = Field(default=3, ge=0, le=100)
    max_new_tokens: PositiveInt = 48
    batch_size: Execution[PositiveInt] = 4
