"""The pipeline as data: each stage of a recipe, what it waits for, and how it is built.

    download ─┬─> dataset ──────────────┐
              └─> convert or translate ─┴─> train ─> export ─> evaluate

A hybrid is translated where a transformer is converted. The Prefect flow runs this table and `mcaflow plan` reads it;
neither knows the stages by itself.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from flows.recipe import PipelineConfig
from mca_lib.errors import ConfigError
from tasks.convert import ConvertStage
from tasks.dataset import DatasetStage
from tasks.download import DownloadStage
from tasks.evaluate import EvaluateStage
from tasks.export import ExportStage
from tasks.stage import Artifact, Stage
from tasks.train import TrainStage
from tasks.translate import TranslateStage

type StageName = Literal["download", "dataset", "convert", "translate", "train", "export", "evaluate"]
type Artifacts = Mapping[str, Artifact]


@dataclass(frozen=True)
class Node:
    """One stage of the pipeline. ``build`` gets the artifacts of ``after``."""

    name: StageName
    after: tuple[StageName, ...]
    build: Callable[[Artifacts], Stage]


def start_of(config: PipelineConfig) -> Literal["convert", "translate"]:
    """The stage that makes the checkpoint which training starts from."""
    return "translate" if config.checkpoint.kind == "hybrid" else "convert"


def nodes_of(config: PipelineConfig) -> dict[StageName, Node]:
    """The stages of a recipe, in an order in which they could run one by one."""
    start = start_of(config)
    make_checkpoint = {"convert": ConvertStage, "translate": TranslateStage}[start]
    table = (
        Node("download", (), lambda done: DownloadStage(config.model)),
        Node(
            "dataset",
            ("download",),
            lambda done: DatasetStage(
                config.dataset, config.training.stage, done["download"], config.checkpoint.resize_vocabulary
            ),
        ),
        Node(start, ("download",), lambda done: make_checkpoint(done["download"], config.checkpoint)),
        Node(
            "train",
            ("dataset", start),
            lambda done: TrainStage(
                checkpoint=done[start],
                dataset=done["dataset"],
                training=config.training,
                parallel=config.parallel,
                launcher=config.launcher,
                lora=config.lora,
                dpo=config.dpo,
            ),
        ),
        Node("export", (start, "train"), lambda done: _export(config, done[start], done["train"])),
        Node(
            "evaluate",
            ("download", "dataset", "export"),
            lambda done: EvaluateStage(done["download"], done["export"], done["dataset"], config.eval),
        ),
    )
    return {node.name: node for node in table}


def _export(config: PipelineConfig, start: Artifact, trained: Artifact) -> ExportStage:
    """LoRA trains an adapter, which is put on the model that it was trained on."""
    if config.training.finetuning_type == "lora":
        return ExportStage(start, config.export, adapter=trained)
    return ExportStage(trained, config.export)


def waves(nodes: Mapping[StageName, Node]) -> Iterator[tuple[StageName, ...]]:
    """The stages in groups that can run side by side: each waits for stages of earlier groups alone."""
    done: set[StageName] = set()
    while len(done) < len(nodes):
        wave = tuple(name for name, node in nodes.items() if name not in done and done.issuperset(node.after))
        yield wave
        done.update(wave)


def nodes_until(config: PipelineConfig, last: StageName | None) -> dict[StageName, Node]:
    """The stages that `last` needs, and itself; all stages where it is None.

    Raises ConfigError for a stage that the recipe does not have.
    """
    nodes = nodes_of(config)
    if last is None:
        return nodes
    needed = {_known(nodes, last)}
    for name in reversed(nodes):
        if name in needed:
            needed.update(nodes[name].after)
    return {name: node for name, node in nodes.items() if name in needed}


def stages_from(config: PipelineConfig, first: StageName) -> tuple[StageName, ...]:
    """`first` and all stages after it. Raises ConfigError for a stage that the recipe does not have."""
    return (_known(nodes_of(config), first), *downstream(config, first))


def check_refresh(nodes: Mapping[StageName, Node], refresh: Iterable[str]) -> frozenset[StageName]:
    """The stages to compute anew. Raises ConfigError for one that is not among those that run."""
    return frozenset(_known(nodes, stage) for stage in refresh)


def _known(nodes: Mapping[StageName, Node], stage: str) -> StageName:
    if stage not in nodes:
        raise ConfigError(f"{stage}: no such stage in this run; it has {', '.join(nodes)}")
    return nodes[stage].name


def downstream(config: PipelineConfig, name: StageName) -> tuple[StageName, ...]:
    """The stages that use the output of ``name``, directly or not, in pipeline order."""
    found: set[StageName] = {name}
    for node in nodes_of(config).values():
        if found & set(node.after):
            found.add(node.name)
    return tuple(stage for stage in nodes_of(config) if stage in found - {name})
