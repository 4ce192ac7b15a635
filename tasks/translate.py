"""Stage *translate*: a Hugging Face transformer becomes a hybrid with fresh Mamba layers, an MCA checkpoint.

It stands in place of *convert* where `checkpoint.kind` is `hybrid`.

identity    pattern; where it has Mamba layers, their sizes (given or derived), how they begin, and the seed
inputs      the model's weights, config, tokenizer
output      an MCA checkpoint, the same bytes every time, which loads at any parallel layout
"""

from dataclasses import asdict, dataclass
from typing import ClassVar

from mca_lib.models.config import McaModelConfig
from tasks.canonical import JSON
from tasks.checkpoint_config import CheckpointConfig, starting_model
from tasks.contract import Input, Produced, Stage, StageContext
from tasks.convert import converted_bytes
from tasks.store import Artifact


@dataclass(frozen=True)
class TranslateStage(Stage):
    """Make a hybrid of `model`, the Hugging Face directory of a transformer."""

    model: Artifact
    config: CheckpointConfig

    name: ClassVar[str] = "translate"
    version: ClassVar[int] = 1

    @property
    def _hybrid(self) -> McaModelConfig:
        return starting_model(McaModelConfig.from_pretrained(self.model.path), self.config)

    def identity(self) -> dict[str, JSON]:
        fields, hybrid = self.config.identity(), self._hybrid.hybrid
        always = {name: fields[name] for name in ("pattern", "resize_vocabulary", "max_logits_difference")}
        if hybrid.mamba is None:
            return always
        return always | {name: fields[name] for name in ("fresh_layers", "seed")} | {"mamba": asdict(hybrid.mamba)}

    def inputs(self) -> dict[str, Input]:
        return {part: Input.of(self.model, part) for part in self.model.parts}

    def space_needed(self) -> int:
        return super().space_needed() + converted_bytes(self.model.path, self._hybrid)

    def produce(self, ctx: StageContext) -> Produced:
        hybrid = self._hybrid
        mamba = hybrid.hybrid.mamba
        spec = {
            "model": str(self.model.path),
            "output": str(ctx.staging),
            "pattern": hybrid.hybrid.pattern,
            "mamba": None if mamba is None else asdict(mamba),
            "fresh_layers": self.config.fresh_layers,
            "seed": self.config.seed,
            "max_logits_difference": self.config.max_logits_difference,
            "resize_vocabulary": self.config.resize_vocabulary,
        }
        result = ctx.run_job("translate", spec)
        ctx.report.info(fresh_summary(hybrid, self.config))
        if self.config.max_logits_difference is None:
            ctx.report.warning("nothing was compared with transformers: checkpoint.max_logits_difference is null")
        return Produced(digest=result.pop("digest"), parts=result.pop("parts"), stats=result)


def fresh_summary(hybrid: McaModelConfig, checkpoint: CheckpointConfig) -> str:
    """Which layers of the hybrid no transformer layer corresponds to, on one line."""
    fresh, count = hybrid.layer_map.fresh, hybrid.num_layers
    if not fresh:
        return f"{hybrid.hybrid.pattern}: no fresh layers"
    begin = {"random": "random", "zero_output": "with a zero output projection"}[checkpoint.fresh_layers]
    layers = ", ".join(map(str, fresh))
    return (
        f"{hybrid.hybrid.pattern}: {len(fresh)} of {count} layers are fresh, {begin}, seed {checkpoint.seed}: {layers}"
    )
