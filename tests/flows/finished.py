"""A recipe with its files and its first result, as the fixtures of this folder hand it to the tests."""

from dataclasses import dataclass
from pathlib import Path

from flows.pipeline import PipelineResult
from flows.recipe import PipelineConfig


@dataclass(frozen=True)
class Run:
    """A recipe with everything that it names, and what the first run of it produced."""

    folder: Path
    config: PipelineConfig
    result: PipelineResult | None = None

    def with_fields(self, **sections: dict) -> PipelineConfig:
        """The recipe with some fields of some sections replaced."""
        content = self.config.model_dump()
        for name, changes in sections.items():
            content[name] |= changes
        return PipelineConfig.model_validate(content)
