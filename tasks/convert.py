"""Stage *convert*: Hugging Face weights become a Megatron-Core checkpoint that loads at any parallel layout."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from mca_lib.models import size
from mca_lib.models.config import McaModelConfig, read_hf_config
from mca_lib.models.families.quantization import is_mxfp4
from tasks.canonical import JSON
from tasks.checkpoint_config import HYBRID_ALONE, CheckpointConfig
from tasks.contract import Input, Produced, Stage, StageContext
from tasks.store import Artifact


@dataclass(frozen=True)
class ConvertStage(Stage):
    """Convert `model`, a Hugging Face directory; the output is the same at whatever layout it is loaded later."""

    model: Artifact
    config: CheckpointConfig

    name: ClassVar[str] = "convert"
    version: ClassVar[int] = 2

    def identity(self) -> dict[str, JSON]:
        return {name: value for name, value in self.config.identity().items() if name not in HYBRID_ALONE}

    def inputs(self) -> dict[str, Input]:
        return {part: Input.of(self.model, part) for part in self.model.parts}

    def space_needed(self) -> int:
        return super().space_needed() + converted_bytes(self.model.path)

    def produce(self, ctx: StageContext) -> Produced:
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


def converted_bytes(model_dir: Path, hybrid: McaModelConfig | None = None) -> int:
    """Bytes of the weights of a Hugging Face directory as a checkpoint, or of the hybrid that is made of it."""
    weights = sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    hf = read_hf_config(model_dir)
    if hf.get("quantization_config") is not None:
        weights *= 4 if is_mxfp4(hf) else 2  # 4 bits, or 8, become 16
    return weights if hybrid is None else weights * size.total(hybrid) // size.total(hybrid.transformer)
