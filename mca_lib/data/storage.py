"""How a data set is stored, and of which corpora it is made: what the recipe says, checked.

rows       a token store (mca_lib/data/token_store.py): documents packed into rows once; every objective
indexed    Megatron's indexed format (mca_lib/data/indexed_rows.py): for pretraining on much text
"""

import importlib.util
import math
import shutil
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from mca_lib.data.formats import Source, SourceConfig
from mca_lib.data.suggest import suggestion
from mca_lib.errors import ConfigError

INDEXED_FROM_BYTES = 1 << 30
"""`storage: auto` takes the indexed format for plain text from this size of the training files on."""


class StorageConfig(SourceConfig, Protocol):
    """The fields of the dataset section that say how it is stored."""

    storage: str
    blend: Mapping[str, float]
    packing: bool


class CorpusFiles(NamedTuple):
    """The training files of one corpus."""

    label: str
    weight: float | None
    """In the blend; None without one."""
    sources: list[Source]


def resolve_storage(config: StorageConfig, objective: str, sources: Sequence[Source]) -> str:
    """`rows` or `indexed`. Raises ConfigError for fields that contradict each other."""
    given = sources[0].format.layout == "indexed"
    if config.storage == "rows" and (given or config.blend):
        what = "formatting: indexed" if given else "dataset.blend"
        raise ConfigError(f"dataset.storage: rows does not go with {what}; use indexed or auto")
    if objective != "pt":
        if config.storage == "indexed" or config.blend:
            field = "storage: indexed" if config.storage == "indexed" else "blend"
            raise ConfigError(f"dataset.{field} is for training.stage pt, not {objective}; leave it out")
        return "rows"
    size = sum(source.path.stat().st_size for source in sources if source.split == "train")
    large = config.storage == "auto" and size >= INDEXED_FROM_BYTES and config.packing
    if not (config.storage == "indexed" or given or config.blend or large):
        return "rows"
    if not config.packing:
        raise ConfigError(
            "dataset.packing: false does not go with storage: indexed, whose rows are always full; use rows"
        )
    corpora(config, sources)
    return "indexed"


def check_executor(kind: str) -> None:
    """Raise ConfigError where a program or package that tokenizes elsewhere (`dataset.executor.kind`) is not here."""
    if kind == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError("dataset.executor.kind: ray is not installed; pip install ray, or use local")
    if kind == "slurm" and shutil.which("sbatch") is None:
        raise ConfigError("dataset.executor.kind: slurm needs sbatch on this machine, and there is none; use local")


def corpora(config: StorageConfig, sources: Sequence[Source]) -> list[CorpusFiles]:
    """The training files by corpus: as the blend names them, else all text together, and each indexed file by itself.

    Raises:
        ConfigError: the blend names what is not there, leaves a file out, or has a weight that is not positive.
    """
    training = [source for source in sources if source.split == "train"]
    if not config.blend:
        if training[0].format.layout == "indexed":
            return [CorpusFiles(source.path.name, None, [source]) for source in training]
        return [CorpusFiles("text", None, training)]
    names = {source.entry or source.path.name for source in training}
    for name, weight in config.blend.items():
        if name not in names:
            raise ConfigError(f"dataset.blend: {name!r} is no file or entry of the data set{suggestion(name, names)}")
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(f"dataset.blend: the weight of {name!r} is {weight:g}; it must be greater than 0")
    if missing := sorted(names - set(config.blend)):
        raise ConfigError(f"dataset.blend: {missing[0]!r} has no weight; give it one, or leave it out of the data set")
    found = [
        CorpusFiles(name, float(weight), [s for s in training if (s.entry or s.path.name) == name])
        for name, weight in config.blend.items()
    ]
    for corpus in found:
        if not corpus.sources[0].entry and len(corpus.sources) > 1:
            raise ConfigError(f"dataset.blend: two files are named {corpus.label!r}; rename one of them")
    return found
