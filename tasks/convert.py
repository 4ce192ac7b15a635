"""Stage *convert*: Hugging Face weights become a Megatron-Core checkpoint that loads at any parallel layout."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from mca_lib.errors import ConfigError
from mca_lib.models.config import read_hf_config
from tasks.canonical import JSON
from tasks.contract import Input, Produced, Stage, StageContext
from tasks.section import Section
from tasks.store import Artifact


class CheckpointConfig(Section):
    """The Megatron-Core checkpoint that training starts from."""

    kind: Literal["gpt", "hybrid"] = "gpt"
    """`gpt`: a transformer; `hybrid`: attention, MLP and Mamba layers by a pattern."""
    resize_vocabulary: bool = False
    """Add rows to embedding and output layer where the tokenizer has more tokens than the model; never shrinks."""
    max_logits_difference: float | None = Field(default=1e-3, gt=0)
    """Largest |Δ| of fp32 logits against transformers that the stage accepts; null: unchecked, for a model whose fp32
    weights do not fit into memory twice."""


@dataclass(frozen=True)
class ConvertStage(Stage):
    """Convert `model`, a Hugging Face directory; the output is the same at whatever layout it is loaded later."""

    model: Artifact
    config: CheckpointConfig

    name: ClassVar[str] = "convert"
    version: ClassVar[int] = 2

    def identity(self) -> dict[str, JSON]:
        return self.config.identity()

    def inputs(self) -> dict[str, Input]:
        return {part: Input.of(self.model, part) for part in self.model.parts}

    def space_needed(self) -> int:
        weights = sum(file.stat().st_size for file in self.model.path.glob("*.safetensors"))
        quantized = read_hf_config(self.model.path).get("quantization_config") is not None
        return super().space_needed() + weights * (2 if quantized else 1)  # FP8 becomes bf16

    def produce(self, ctx: StageContext) -> Produced:
        if self.config.kind == "hybrid":
            raise ConfigError("checkpoint.kind: hybrid is not available in this release; use gpt")
        spec = {
            "model": str(self.model.path),
            "output": str(ctx.staging),
            "max_logits_difference": self.config.max_logits_difference,
            "resize_vocabulary": self.config.resize_vocabulary,
        }
        result = ctx.run_job("convert", spec)
        if result["logits"] is None:
            ctx.report.warning("logits were not compared with transformers: checkpoint.max_logits_difference is null")
        return Produced(digest=result.pop("digest"), parts=result.pop("parts"), stats=result)
