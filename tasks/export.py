"""Stage *export*: the trained checkpoint becomes a Hugging Face directory, or the converted one with its adapter."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from mca_lib.converter.remote_files import code_files
from mca_lib.models.config import McaModelConfig
from mca_lib.models.families import mcaflow_hybrid
from mca_lib.models.registry import weights_family
from tasks.canonical import JSON
from tasks.contract import Input, Produced, Stage, StageContext
from tasks.digests import digest_file
from tasks.section import Section
from tasks.store import Artifact


class ExportConfig(Section):
    """The Hugging Face directory at the end."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is the dtype of the source model."""
    max_shard_size: str = Field(default="5GB", pattern=r"^\d+(\.\d+)?(KB|MB|GB)$")
    """Largest weights file, in decimal units."""
    lora: Literal["merged", "adapter", "both"] = "both"
    """After a training with LoRA: the merged model, the adapter alone as PEFT has it, or the model with the adapter in
    its folder `adapter`."""


@dataclass(frozen=True)
class ExportStage(Stage):
    """Write `checkpoint`, an MCA checkpoint directory, as a Hugging Face directory; with `adapter`, if there is one."""

    checkpoint: Artifact
    config: ExportConfig
    adapter: Artifact | None = None
    """PEFT's directory, from a training with LoRA on `checkpoint`."""

    name: ClassVar[str] = "export"
    version: ClassVar[int] = 1

    def identity(self) -> dict[str, JSON]:
        config = McaModelConfig.from_pretrained(self.checkpoint.path)
        if weights_family(config) is not mcaflow_hybrid.FAMILY:
            return self._options()
        # The export of a hybrid with Mamba layers holds the code that transformers runs it with.
        return self._options() | {"code": {path.name: digest_file(path) for path in code_files()}}

    def _options(self) -> dict[str, JSON]:
        fields = self.config.identity()
        return fields if self.adapter is not None else {n: value for n, value in fields.items() if n != "lora"}

    def inputs(self) -> dict[str, Input]:
        adapter = {} if self.adapter is None else {"adapter": Input.of(self.adapter)}
        return {"checkpoint": Input.of(self.checkpoint), **adapter}

    def space_needed(self) -> int:
        files = (self.checkpoint.path / "model").rglob("*")
        return super().space_needed() + sum(file.stat().st_size for file in files if file.is_file())

    def produce(self, ctx: StageContext) -> Produced:
        spec = {"checkpoint": str(self.checkpoint.path), "output": str(ctx.staging), **self._options()}
        if self.adapter is not None:
            spec |= {"adapter": str(self.adapter.path), "base": self.checkpoint.parts.get("weights")}
        return Produced(stats=ctx.run_job("export", spec))
