"""The pipeline as data: each stage, what it waits for, and how it is built from the recipe.

    download ─┬─> dataset ──┐
              └─> convert ──┴─> train ─> export ─> evaluate

The Prefect flow runs this table and `mcaflow plan` reads it; neither knows the stages by itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from flows.recipe import PipelineConfig
from tasks.convert import ConvertStage
from tasks.dataset import DatasetStage
from tasks.download import DownloadStage
from tasks.evaluate import EvaluateStage
from tasks.export import ExportStage
from tasks.stage import Artifact, Stage
from tasks.train import TrainStage

type StageName = Literal["download", "dataset", "convert", "train", "export", "evaluate"]
type Artifacts = Mapping[str, Artifact]


@dataclass(frozen=True)
class Node:
    """One stage of the pipeline. ``build`` gets the artifacts of ``after``."""

    name: StageName
    after: tuple[StageName, ...]
    build: Callable[[PipelineConfig, Artifacts], Stage]


PIPELINE: tuple[Node, ...] = (
    Node("download", (), lambda config, done: DownloadStage(config.model)),
    Node(
        "dataset",
        ("download",),
        lambda config, done: DatasetStage(
            config.dataset, config.training.stage, done["download"], config.checkpoint.resize_vocabulary
        ),
    ),
    Node("convert", ("download",), lambda config, done: ConvertStage(done["download"], config.checkpoint)),
    Node(
        "train",
        ("dataset", "convert"),
        lambda config, done: TrainStage(
            checkpoint=done["convert"],
            dataset=done["dataset"],
            training=config.training,
            parallel=config.parallel,
            launcher=config.launcher,
            lora=config.lora,
            dpo=config.dpo,
        ),
    ),
    Node("export", ("convert", "train"), lambda config, done: _export(config, done)),
    Node(
        "evaluate",
        ("download", "dataset", "export"),
        lambda config, done: EvaluateStage(done["download"], done["export"], done["dataset"], config.eval),
    ),
)


def _export(config: PipelineConfig, done: Artifacts) -> ExportStage:
    """LoRA trains an adapter, which is put on the model that it was trained on."""
    if config.training.finetuning_type == "lora":
        return ExportStage(done["convert"], config.export, adapter=done["train"])
    return ExportStage(done["train"], config.export)


NODES: dict[StageName, Node] = {node.name: node for node in PIPELINE}


def downstream(name: StageName) -> tuple[str, ...]:
    """The stages that use the output of ``name``, directly or not, in pipeline order."""
    found: set[str] = {name}
    for node in PIPELINE:
        if found & set(node.after):
            found.add(node.name)
    return tuple(node.name for node in PIPELINE if node.name in found - {name})
