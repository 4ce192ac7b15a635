"""Stage *dataset*: rows of text become a validated, shuffled, optionally packed, memory-mapped token store.

Much plain text becomes corpora in Megatron's indexed format instead; corpora that are in it stay where they are.

identity    the section; each data file by name and content; the entries of dataset_info.json; the model's vocabulary
            size; the versions of the tokenizing libraries (one release of transformers tokenized a text differently
            from another; where it does not, the content digest stops the change here)
inputs      the tokenizer of the model
execution   where the files lie; the number of workers, and whether they are here, on Slurm or on Ray. (The path of a
            corpus that is used in place is in the key: the artifact names it.)
body        the job `dataset` (mca_lib/data/prepare.py)
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from blake3 import blake3
from pydantic import Field, PositiveInt, model_validator

from mca_lib.data.dataset_info import read_entries
from mca_lib.data.formats import Source, resolve_sources, shows_images
from mca_lib.data.rows import Sample, read_samples
from mca_lib.data.spec import TOKENIZING_LIBRARIES
from mca_lib.data.storage import resolve_storage
from mca_lib.errors import ConfigError, DataError, ModelError
from tasks.canonical import JSON
from tasks.contract import Input, Produced, Stage, StageContext
from tasks.report import Reporter
from tasks.section import Execution, Section
from tasks.store import Artifact, ArtifactStore

# Where the data lies; what it is enters the key by content.
LOCATIONS = ("files", "dataset_dir", "names", "eval_files", "media_dir")
# In the key where they are given, so that they are new to no store of text.
IMAGE_FIELDS = ("min_pixels", "max_pixels")
# Bytes written per byte of data: 9 per token (the store, and what is spilled on the way), over 3 bytes of text a token.
SPACE_PER_DATA_BYTE = 3
NAMED_IN_WARNING = 3


class ExecutorConfig(Section):
    """Where plain text is tokenized, with `storage: indexed`: datatrove's executors. It changes no token."""

    kind: Execution[Literal["local", "slurm", "ray"]] = "local"
    """local: processes of this machine. slurm: one job array. ray: a running cluster, or one of this machine."""
    partition: Execution[str | None] = None
    """Of Slurm; required there."""
    qos: Execution[str | None] = None
    """Of Slurm."""
    time: Execution[str] = "24:00:00"
    """Longest run of a task, on Slurm and Ray."""
    mem_per_cpu_gb: Execution[PositiveInt] = 4
    """Of a task, on Slurm and Ray."""
    sbatch_args: Execution[dict[str, str]] = Field(default_factory=dict)
    """More options of sbatch, such as `{account: research}`."""

    @model_validator(mode="after")
    def _slurm_has_a_partition(self) -> Self:
        if self.kind == "slurm" and self.partition is None:
            raise ValueError("partition is required with kind slurm")
        return self


class DatasetConfig(Section):
    """What the model learns from, in LLaMA-Factory's formats."""

    files: list[str] = Field(default_factory=list)
    """Data files (json, jsonl, csv, parquet, txt; bin with `formatting: indexed`), read in this order."""
    dataset_dir: str | None = None
    """Folder with a `dataset_info.json`, as an alternative to `files`."""
    names: list[str] = Field(default_factory=list)
    """Entries of `dataset_info.json` to use, in this order."""
    formatting: Literal["alpaca", "sharegpt", "text", "indexed"] = "alpaca"
    """Layout of the rows of `files`; `text` is plain text for pretraining, `indexed` are tokens in Megatron's format,
    a .bin beside its .idx, which are used where they are."""
    ranking: bool = False
    """Rows of `files` hold a chosen and a rejected answer, for `training.stage: dpo`."""
    columns: dict[str, str] = Field(default_factory=dict)
    """LLaMA-Factory's column map, for instance `{prompt: question, response: answer}`."""
    tags: dict[str, str] = Field(default_factory=dict)
    """LLaMA-Factory's role tags of sharegpt rows."""
    template: str | None = None
    """Chat template by LLaMA-Factory's name, for instance `qwen`; null for plain text."""
    default_system: str | None = None
    """System text of conversations that bring none; null takes the template's own."""
    enable_thinking: bool | None = True
    """Templates of reasoning models: true learns an empty thought where an answer has none, null puts it into the
    prompt, false also removes the thoughts that answers have."""
    cutoff_len: int = Field(default=1024, ge=8, le=2**20)
    """Longest training sequence, in tokens. A longer conversation keeps its beginning; one whose answers are all beyond
    is dropped, and the stage fails when these are more than half of the rows. Plain text is cut into pieces instead.
    It bounds each of two answers with its prompt; a pair that is cut so that nothing tells them apart is dropped."""
    packing: bool = True
    """Put several documents into one sequence; they never see each other. Pairs of answers share one of up to
    2 × `cutoff_len` tokens."""
    storage: Literal["auto", "rows", "indexed"] = "auto"
    """rows: a token store, packed once. indexed: Megatron's indexed format, for plain text of any size; rows are cut
    from documents strung together in random order. auto: indexed for pretraining on 1 GiB of files or more."""
    blend: dict[str, float] = Field(default_factory=dict)
    """For pretraining: weights of several corpora, by file name or entry of `names`, as `{web.jsonl: 7, code.txt: 3}`;
    they need not add up to 1."""
    media_dir: str | None = None
    """What the paths of images in the rows are relative to; null: the folder of the data file, or `dataset_dir`."""
    min_pixels: PositiveInt | None = None
    """Smaller images are enlarged to so many pixels; null does as the model's own image processor."""
    max_pixels: PositiveInt | None = None
    """Larger images are reduced; this bounds the tokens that stand for one."""
    train_on_prompt: bool = False
    """Put loss on the prompt too."""
    mask_history: bool = False
    """Put loss on the last answer of a conversation only."""
    max_rows: PositiveInt | None = None
    """Use this many rows, drawn with `seed`."""
    eval_files: list[str] = Field(default_factory=list)
    """Files with held-out rows; without them, `eval_fraction` of the rows is held out."""
    eval_fraction: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Share of the rows that is held out for evaluation."""
    max_bad_fraction: float = Field(default=0.01, ge=0.0, le=1.0)
    """The stage fails when more than this share of the rows is unusable, be it seen before or while encoding."""
    seed: int = Field(default=42, ge=0, lt=2**31)
    """Seed of the split, of the shuffle and of `max_rows`."""
    num_workers: Execution[PositiveInt] = 1
    """Processes that tokenize, or tasks that do at the same time on Slurm or Ray."""
    executor: Execution[ExecutorConfig] = ExecutorConfig()
    """Where they run, with `storage: indexed`."""

    @model_validator(mode="after")
    def _pixels_are_a_range(self) -> Self:
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is more than max_pixels {self.max_pixels}")
        return self


@dataclass(frozen=True)
class DatasetStage(Stage):
    """Tokenize `config` for the model whose directory `model` is. `objective` is `training.stage`."""

    name: ClassVar[str] = "dataset"
    version: ClassVar[int] = 1

    config: DatasetConfig
    objective: str
    model: Artifact
    resize_vocabulary: bool = False
    """`checkpoint.resize_vocabulary`: tokens beyond the model's vocabulary get rows, and are accepted."""
    digests: Mapping[str, dict[str, JSON]] | None = None
    """Split -> content digest of each of its files by position and name: a moved file changes nothing, and a plan names
    the file that changed. Of a corpus that is used in place also its path. Set by `resolve`."""

    def resolve(self, store: ArtifactStore, report: Reporter) -> "DatasetStage":
        """Look at the data files, and decide how they are stored.

        Raises:
            ConfigError: fields of the section that contradict each other or the objective.
            DataError: a file that is not there.
        """
        digests: dict[str, dict[str, JSON]] = {"train": {}, "eval": {}}
        sources = resolve_sources(self.config, self.objective)
        storage = resolve_storage(self.config, self.objective, sources)
        if storage == "rows" and self.config.executor.kind != "local":
            raise ConfigError(
                f"dataset.executor: {self.config.executor.kind} needs storage: indexed; use local, or that"
            )
        for source in sources:
            found = digests[source.split]
            label = f"{source.entry}/{source.path.name}" if source.entry else source.path.name
            digest = store.statcache.digest(source.path)
            if source.format.layout == "indexed":
                digest = {
                    "path": str(source.path.resolve()),
                    "bin": digest,
                    "idx": store.statcache.digest(source.index),
                }
            found[f"{len(found) + 1} {label}"] = digest
        if images := _images(sources, store):
            digests["images"] = {"content": images}
        config = self.config.model_copy(update={"storage": storage})
        return dataclasses.replace(self, config=config, digests=digests)

    def identity(self) -> dict[str, JSON]:
        if self.digests is None:
            raise ValueError("DatasetStage.resolve() comes before identity()")
        section = {name: value for name, value in self.config.identity().items() if name not in LOCATIONS}
        section = {name: value for name, value in section.items() if name not in IMAGE_FIELDS or value is not None}
        section |= {"images": self.digests["images"]} if "images" in self.digests else {}
        return section | {
            "objective": self.objective,
            "files": self.digests["train"],
            "eval_files": self.digests["eval"],
            "entries": self._entries(),
            "vocab_size": self._vocab_size(),
            "resize_vocabulary": self.resize_vocabulary,
            "libraries": {name: version(name) for name in TOKENIZING_LIBRARIES},
        }

    def inputs(self) -> dict[str, Input]:
        return {"tokenizer": Input.of(self.model, "tokenizer")}

    def space_needed(self) -> int:
        sources = resolve_sources(self.config, self.objective)
        if self.config.formatting == "indexed":
            return super().space_needed() + sum(source.index.stat().st_size for source in sources)
        images = sum(Path(path).stat().st_size for path in dict.fromkeys(_image_paths(sources)))
        text = SPACE_PER_DATA_BYTE * sum(source.path.stat().st_size for source in sources)
        return super().space_needed() + text + images

    def produce(self, ctx: StageContext) -> Produced:
        spec = self.config.model_dump(mode="json") | {
            "objective": self.objective,
            "tokenizer_dir": str(self.model.path),
            "vocab_size": self._vocab_size(),
            "resize_vocabulary": self.resize_vocabulary,
            "output": str(ctx.staging),
        }
        if self.config.storage == "indexed":
            spec |= {"work": str(ctx.work), "file_digests": self._corpus_digests()}
        result = ctx.run_job("dataset", spec)
        if self.resolve(ctx.store, ctx.report).identity() != self.identity():
            raise DataError("the data files changed while they were read; run again")
        losses = _describe_losses(result["stats"])
        if losses:
            ctx.report.warning(losses)
        return Produced(digest=result["digest"], parts=result["parts"], stats=result["stats"])

    def _corpus_digests(self) -> dict[str, str]:
        """Path of each corpus that is used in place -> digest of its content."""
        files = (digest for found in (self.digests or {}).values() for digest in found.values())
        return {str(d["path"]): f"{d['bin']} {d['idx']}" for d in files if isinstance(d, dict)}

    def _entries(self) -> dict[str, JSON]:
        """What dataset_info.json says about the rows; which file holds them is in the key by its content."""
        if not self.config.names:
            return {}
        entries = read_entries(self.config.dataset_dir, self.config.names)
        return {e.name: {key: value for key, value in e.fields.items() if key != "file_name"} for e in entries}

    def _vocab_size(self) -> int:
        path = self.model.path / "config.json"
        try:
            config = json.loads(path.read_bytes())
            size = (config.get("text_config") or config).get("vocab_size")
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from None
        if type(size) is not int or size < 1:
            raise ModelError(f"{path}: vocab_size is {size!r}; it must be the number of rows of the embedding")
        return size


def _images(sources: Sequence[Source], store: ArtifactStore) -> str:
    """Digest of all images that the rows show, by where the rows show them; "" where no row can show one."""
    if not shows_images(sources):
        return ""
    known: dict[str, str] = {}
    content = blake3()
    for path in _image_paths(sources):
        if path not in known:
            known[path] = store.statcache.digest(Path(path))
        content.update(known[path].encode("ascii"))
    return content.hexdigest()


def _image_paths(sources: Sequence[Source]) -> Iterator[str]:
    """Of all rows, in their order; none where no row can show an image."""
    if shows_images(sources):
        for row in read_samples(sources):
            yield from row.images if isinstance(row, Sample) else ()


def _describe_losses(stats: Mapping[str, Any]) -> str:
    """Which rows the data set does not have, or not whole, in one line; "" when it has all of them."""
    rows, named = stats["rows"], stats["named_rows"][:NAMED_IN_WARNING]
    parts = []
    for what, reasons in (("unusable", rows["bad"]), ("dropped", rows["dropped"])):
        if reasons:
            listed = ", ".join(f"{n} × {reason}" for reason, n in sorted(reasons.items(), key=lambda item: -item[1]))
            parts.append(f"{sum(reasons.values())} {what} ({listed})")
    if rows["truncated"]:
        parts.append(f"{rows['truncated']} truncated to dataset.cutoff_len {stats['cutoff_len']}")
    if not parts:
        return ""
    first = f"; first: {'; '.join(named)}" if named else ""
    return f"of {rows['read']} rows, {', '.join(parts)}{first}"
