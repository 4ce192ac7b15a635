"""Stage *export*: the trained checkpoint becomes a Hugging Face directory."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from tasks.canonical import JSON
from tasks.contract import Input, Produced, Stage, StageContext
from tasks.section import Section
from tasks.store import Artifact


class ExportConfig(Section):
    """The Hugging Face directory at the end."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is the dtype of the source model."""
    max_shard_size: str = Field(default="5GB", pattern=r"^\d+(\.\d+)?(KB|MB|GB)$")


@dataclass(frozen=True)
class ExportStage(Stage):
    """Write `checkpoint`, an MCA checkpoint directory, as a Hugging Face directory."""

    checkpoint: Artifact
    config: ExportConfig

    name: ClassVar[str] = "export"
    version: ClassVar[int] = 1

    def identity(self) -> dict[str, JSON]:
        return self.config.identity()

    def inputs(self) -> dict[str, Input]:
        return {"checkpoint": Input.of(self.checkpoint)}

    def space_needed(self) -> int:
        files = (self.checkpoint.path / "model").rglob("*")
        return super().space_needed() + sum(file.stat().st_size for file in files if file.is_file())

    def produce(self, ctx: StageContext) -> Produced:
        spec = {"checkpoint": str(self.checkpoint.path), "output": str(ctx.staging), **self.config.identity()}
        return Produced(stats=ctx.run_job("export", spec))
