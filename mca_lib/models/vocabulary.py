"""A larger vocabulary than the source's, for a tokenizer with more tokens.

Rows are appended to the embedding and to the output layer, to each from its own rows:

    new row = mean of the old rows + SPREAD · their standard deviation · noise      per channel

The mean makes a new token neither likely nor unlikely, the noise makes new tokens differ. Noise comes from a generator
that is seeded by the tensor's name and the row's number, and the mean is summed over the whole tensor in a fixed
order, so that a row is the same bits on every rank and at every layout. No rank asks another: who owns a new row makes
it. A tied output layer is the embedding, in its new rows as in its old ones.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mca_lib.checkpoint.reader import CheckpointReader
from mca_lib.converter.hf_source import HfSource
from mca_lib.converter.mapping import TensorSlice
from mca_lib.converter.mappings import Vocabulary
from mca_lib.converter.plan import TensorInfo
from mca_lib.models.config import McaModelConfig
from mca_lib.models.naming import checkpoint_parameters
from mca_lib.models.registry import family_of
from mca_lib.named_random import named_generator

if TYPE_CHECKING:
    from mca_lib.models.language_model import McaLanguageModel

SPREAD = 0.01
"""Standard deviation of the new rows around the mean, relative to that of the old rows."""
_BAND = 4096
"""Rows that are read at once."""


def with_vocabulary(config: McaModelConfig, size: int) -> McaModelConfig:
    """The config with at least `size` rows; a vocabulary never shrinks."""
    if size <= config.vocab_size:
        return config
    hf = dict(config.hf_config)
    if hf.get("text_config"):
        hf["text_config"] = {**hf["text_config"], "vocab_size": size}
    else:
        hf["vocab_size"] = size
    return replace(config, vocab_size=size, hf_config=hf)


def new_rows(name: str, old: TensorSlice, count: int, first: int, last: int) -> torch.Tensor:
    """Rows `first:last` of the larger tensor, in the dtype of the old one.

    Args:
        name: the tensor's name in the checkpoint.
        old: the tensor of `count` rows that is there; read in whole.
        first: at least `count`.
    """
    total_H = squares_H = 0.0
    for start in range(0, count, _BAND):
        band_VH = old[start : min(start + _BAND, count)]
        band64_VH = band_VH.double()
        total_H, squares_H = total_H + band64_VH.sum(0), squares_H + band64_VH.square().sum(0)
    mean_H = total_H / count
    deviation_H = (squares_H / count - mean_H.square()).clamp(min=0).sqrt()
    rows_VH = [mean_H + SPREAD * deviation_H * _noise(name, row, len(mean_H)) for row in range(first, last)]
    return torch.stack(rows_VH).to(band_VH.dtype)


def _noise(name: str, row: int, hidden: int) -> torch.Tensor:
    return torch.randn(hidden, generator=named_generator(name, row), dtype=torch.float64)


def extra_rows(source: HfSource, config: McaModelConfig, size: int) -> dict[str, torch.Tensor]:
    """Name in the checkpoint → the rows that a vocabulary of `size` adds to the source's."""
    count = config.vocab_size
    if size <= count:
        return {}
    config = _as_spelled(config, source)
    return {r.mca: new_rows(r.mca, source.slice(r.hf[0]), count, count, size) for r in _vocabulary_rows(config)}


@torch.no_grad()
def grow_transformers(model: Any, size: int) -> None:
    """Give a model of transformers the rows that its conversion adds for a vocabulary of `size`, in its own dtype."""
    count = model.config.get_text_config().vocab_size
    if size <= count:
        return
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    own = {"embedding.word_embeddings.weight": embedding} | ({} if head is embedding else {"output_layer.weight": head})
    rows = {name: new_rows(name, weight.cpu(), count, count, size) for name, weight in own.items()}
    model.resize_token_embeddings(size, mean_resizing=False)
    for layer, name in zip((model.get_input_embeddings(), model.get_output_embeddings()), rows, strict=False):
        layer.weight[count:] = rows[name]


class GrownSource:
    """A Hugging Face source that shows its embedding and output layer as if they had the larger vocabulary.

    Args:
        config: of the source.
        size: rows to show.
    """

    def __init__(self, source: HfSource, config: McaModelConfig, size: int) -> None:
        self.source = source
        self.count, self.size = config.vocab_size, size
        config = _as_spelled(config, source)
        names = {row.hf[0]: row.mca for row in _vocabulary_rows(config)}
        copies = family_of(config.model_type).copies_of(config).items()
        names |= {copy: names[of] for copy, of in copies if of in names}
        self._names = {name: mca for name, mca in names.items() if name in source.tensors}
        self.tensors = dict(source.tensors)
        for name in self._names:
            info = source.tensors[name]
            if info.shape[0] == self.count:  # else the plan has something to say
                self.tensors[name] = TensorInfo((size, *info.shape[1:]), info.dtype)

    def dtype(self, name: str) -> torch.dtype:
        """As `HfSource.dtype`."""
        return self.source.dtype(name)

    def slice(self, name: str) -> TensorSlice:
        """The tensor, to be indexed."""
        old = self.source.slice(name)
        return _GrownTensor(self._names[name], old, self.count, self.size) if name in self._names else old

    def file(self, name: str) -> Any:
        """The file that holds the tensor's old rows."""
        return self.source.file(name)


class _GrownTensor:
    """Old rows from the file, new ones made when they are asked for."""

    def __init__(self, name: str, old: TensorSlice, count: int, size: int) -> None:
        self.name, self.old, self.count, self.size = name, old, count, size
        self.dtype = old.dtype

    def __getitem__(self, index: object) -> torch.Tensor:
        rows, *rest = index if isinstance(index, tuple) else (index,)
        start, stop, _ = rows.indices(self.size)
        old = self.old[min(start, self.count) : min(stop, self.count)]
        first = max(start, self.count)
        if first < stop:
            old = torch.cat([old, new_rows(self.name, self.old, self.count, first, stop)])
        return old[(slice(None), *rest)]


@torch.no_grad()
def fill_new_rows(models: Iterable["McaLanguageModel"], reader: CheckpointReader, count: int, size: int) -> None:
    """Set rows `count:size` of the vocabulary, which the checkpoint that was loaded does not have."""
    for name, parameter, start in _held_vocabulary(models):
        stop = min(start + len(parameter), size)
        first = max(start, count)
        if first < stop:
            parameter[first - start : stop - start] = new_rows(name, reader.read(name), count, first, stop)


@torch.no_grad()
def zero_padding(model: "McaLanguageModel") -> None:
    """Set the rows that pad a chunk's vocabulary for its tensor parallel ranks to zero.

    They are never looked up and never predicted; zero makes them the same at every layout.
    """
    if not model.padding_rows:
        return
    for _, parameter, _ in _held_vocabulary([model]):
        parameter[-model.padding_rows :] = 0


def _held_vocabulary(models: Iterable["McaLanguageModel"]) -> Iterator[tuple[str, torch.nn.Parameter, int]]:
    """(Name in the checkpoint, parameter, number of its first row) of this rank's shares of the vocabulary."""
    from megatron.core import parallel_state

    for model in models:
        names = {row.mca for row in _vocabulary_rows(model.mca_config)}
        for name, parameter in checkpoint_parameters(model):
            if name in names:
                yield name, parameter, parallel_state.get_tensor_model_parallel_rank() * len(parameter)


def _as_spelled(config: McaModelConfig, source: HfSource) -> McaModelConfig:
    """The config with the source's spelling of names."""
    return replace(config, source_prefixes=family_of(config.model_type).prefixes_in(source.tensors))


def _vocabulary_rows(config: McaModelConfig) -> list[Vocabulary]:
    return [row for row in family_of(config.model_type).mappings(config) if isinstance(row, Vocabulary)]
