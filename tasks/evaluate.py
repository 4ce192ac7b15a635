"""Stage *evaluate*: the base model and the trained one on held-out rows.

metrics.json     loss, perplexity, accuracy per model, and their difference with its standard error
samples.jsonl    what both models answer to the same prompts
report.md        both, as tables
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from tasks.canonical import JSON
from tasks.contract import Input, Produced, Stage, StageContext
from tasks.section import Execution, Section
from tasks.store import Artifact


class EvalConfig(Section):
    """What is measured at the end."""

    max_rows: PositiveInt | None = None
    """Held-out rows to use; null for all."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation, for both models."""
    prompts: list[str] = Field(default_factory=list)
    """Prompts of the sample generations; without any, the first held-out prompts."""
    num_samples: int = Field(default=3, ge=0, le=100)
    """Held-out prompts to generate from; without effect when `prompts` are given."""
    max_new_tokens: PositiveInt = 48
    """Longest sample generation, in tokens."""
    batch_size: Execution[PositiveInt] = 4
    """Rows per forward pass."""


# Waiting OpenMP threads otherwise spin: measured 3 times slower where other processes use the same cores.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class EvaluateStage(Stage):
    """Measure `base` and `trained`, two Hugging Face directories, on the eval split of `dataset`."""

    base: Artifact
    trained: Artifact
    dataset: Artifact
    config: EvalConfig

    name: ClassVar[str] = "evaluate"
    version: ClassVar[int] = 1

    def identity(self) -> dict[str, JSON]:
        return self.config.identity()

    def inputs(self) -> dict[str, Input]:
        # Without held-out rows there is no such part, and the template's stop tokens are all that matters.
        part = "eval" if "eval" in self.dataset.parts else None
        return {
            "base": Input.of(self.base),
            "trained": Input.of(self.trained),
            "dataset": Input.of(self.dataset, part),
        }

    def produce(self, ctx: StageContext) -> Produced:
        spec = self.config.model_dump(mode="json") | {
            "models": {"base": str(self.base.path), "trained": str(self.trained.path)},
            "token_store": str(self.dataset.path / "eval"),
            "tokenizer_dir": str(self.trained.path),
            "output": str(ctx.staging),
        }
        return Produced(stats=ctx.run_job("evaluate", spec, env=ENVIRONMENT))
