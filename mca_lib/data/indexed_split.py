"""The training split of an indexed data set: Megatron-Core's indices over corpora, where `IndexedRows` maps them.

A blend gives each corpus a weight. Its epoch has as many rows as the whole ones of all corpora together, and of each
corpus as many as the weights say, to within one. Where that is more than a corpus has, it is repeated, in a new order
each time; where it is less, some of its rows are never seen.
"""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3

from mca_lib.data.indexed_format import Indexed
from mca_lib.data.indexed_rows import META, IndexedRows
from mca_lib.errors import DataError

if TYPE_CHECKING:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

_BLOCK = 1 << 22
_SAMPLES = _SAMPLE = 1 << 10
"""How many spans of how many tokens stand for a corpus."""


@dataclass(frozen=True)
class CorpusSource:
    """What a corpus is made of."""

    name: str
    """Of its files in the split."""
    label: str
    """For people."""
    tokens: Indexed
    documents_N: np.ndarray
    """int32 [N]: the documents to train on."""
    weight: float | None
    """In the blend; None without one."""
    digest: str
    """Of the .bin and .idx files."""
    largest_id: int

    @cached_property
    def num_tokens(self) -> int:
        """Of the documents to train on."""
        return int(self.tokens.lengths_D[self.documents_N].sum(dtype=np.int64))


def write_indexed_split(path: Path, sources: Sequence[CorpusSource], *, sequence_length: int, seed: int) -> IndexedRows:
    """Write the indices of a split and open it. The corpora lie in `path` already, or where the user has them.

    Raises:
        DataError: a corpus without two tokens, or none of a blend that fills one row.
    """
    for source in sources:
        if source.num_tokens < 2:
            raise DataError(f"{source.label}: holds no two tokens, so nothing can be predicted; leave it out")
    cache = path / ".cache"
    shutil.rmtree(cache, ignore_errors=True)
    config = _config(sources, sequence_length, seed, cache)
    blended = sources[0].weight is not None
    if blended:
        datasets = _write_blend(path, sources, config)
        tokens = sequence_length * _whole_rows(sources, sequence_length)
    else:
        datasets = [_gpt_dataset(source, None, config) for source in sources]
        tokens = sum(source.num_tokens - 1 for source in sources)
    for source, dataset in zip(sources, datasets, strict=True):
        samples = dataset.sample_index if blended else _with_rest(source, dataset)
        np.save(path / f"{source.name}.document_index.npy", dataset.document_index)
        np.save(path / f"{source.name}.sample_index.npy", samples)
    shutil.rmtree(cache)
    prefixes = [s.tokens.prefix for s in sources]
    corpora = {s.name: p.name if p.parent == path else str(p) for s, p in zip(sources, prefixes, strict=True)}
    meta = {
        "corpora": corpora,
        "blended": blended,
        "sequence_length": sequence_length,
        "tokens": tokens,
        "largest_id": max(source.largest_id for source in sources),
    }
    (path / META).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    return IndexedRows.open(path)


def indexed_statistics(rows: IndexedRows, sources: Sequence[CorpusSource], sequence_length: int) -> dict[str, Any]:
    """Counts of an epoch, as `split_statistics` gives them, and of each corpus what is drawn of what it has."""
    lengths = np.concatenate([source.tokens.lengths_D[source.documents_N] for source in sources])
    quantiles = {"min": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    drawn = rows.rows_of_corpora
    return {
        "rows": len(rows),
        "documents": len(lengths),
        "tokens": rows.num_tokens,
        "loss_tokens": rows.num_loss_tokens,
        "fill": round(rows.num_tokens / (len(rows) * sequence_length), 6),
        "document_length": {name: int(np.quantile(lengths, q, method="higher")) for name, q in quantiles.items()},
        "largest_id": rows.largest_id,
        "corpora": {
            source.label: {
                "documents": len(source.documents_N),
                "tokens": source.num_tokens,
                "weight": source.weight,
                "rows": count,
            }
            for source, count in zip(sources, drawn, strict=True)
        },
    }


def indexed_digest(path: Path, sources: Sequence[CorpusSource]) -> str:
    """BLAKE3 over the corpora's digests and the indices: what the rows are, wherever the corpora lie."""
    hasher = blake3(json.dumps([source.digest for source in sources]).encode("ascii"))
    _add_indices(hasher, path)
    return hasher.hexdigest()


def sampled_digest(rows: IndexedRows) -> str:
    """BLAKE3 over the indices, the documents' lengths and a sample of the tokens: other data has another one, but of a
    corpus of more than a million tokens a change of single documents that leaves all lengths may not be seen.
    """
    hasher = blake3(json.dumps([rows.sequence_length, len(rows.corpora)]).encode("ascii"))
    _add_indices(hasher, rows.path)
    for corpus in rows.corpora:
        lengths_D, tokens_T = corpus.tokens.lengths_D, corpus.tokens.tokens_T
        for start in range(0, len(lengths_D), _BLOCK):
            hasher.update(lengths_D[start : start + _BLOCK].tobytes())
        for start in np.linspace(0, len(tokens_T), _SAMPLES, endpoint=False, dtype=np.int64).tolist():
            hasher.update(tokens_T[start : start + _SAMPLE].tobytes())
    return hasher.hexdigest()


def _add_indices(hasher: blake3, path: Path) -> None:
    for file in sorted(path.glob("*.npy")):
        array = np.load(file, mmap_mode="r").view(np.ndarray).reshape(-1)
        hasher.update(json.dumps([file.name, array.dtype.str, len(array)]).encode("ascii"))
        for start in range(0, len(array), _BLOCK):
            hasher.update(array[start : start + _BLOCK].tobytes())


def _write_blend(path: Path, sources: Sequence[CorpusSource], config: "GPTDatasetConfig") -> list["GPTDataset"]:
    """Write which row of which corpus each row is. Returns the corpora with as many rows as that needs."""
    from megatron.core.datasets.blended_dataset import BlendedDataset

    size = _whole_rows(sources, config.sequence_length)
    if not size:
        raise DataError(
            f"dataset.cutoff_len: no corpus of the blend holds {config.sequence_length + 1} tokens; use less"
        )
    total = math.fsum(source.weight or 0.0 for source in sources)
    shares = [(source.weight or 0.0) / total for source in sources]
    datasets = [
        _gpt_dataset(source, math.ceil(size * share) + 1, config) for source, share in zip(sources, shares, strict=True)
    ]
    blend = BlendedDataset(datasets, shares, size, config)
    rows = np.empty(size, dtype=np.int64)
    for number, dataset in enumerate(datasets):
        chosen = blend.dataset_index == number
        # The one use of Megatron's shuffle of samples: it says which of them a part of an epoch is.
        rows[chosen] = dataset.shuffle_index[blend.dataset_sample_index[chosen]]
    np.save(path / "row_corpora.npy", blend.dataset_index)
    np.save(path / "row_samples.npy", rows)
    return datasets


def _whole_rows(sources: Sequence[CorpusSource], sequence_length: int) -> int:
    """Full rows of all corpora. The last label of a row is the token after it."""
    return sum((source.num_tokens - 1) // sequence_length for source in sources)


def _gpt_dataset(source: CorpusSource, num_samples: int | None, config: "GPTDatasetConfig") -> "GPTDataset":
    """Megatron's data set over the chosen documents; None samples are one epoch."""
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.datasets.utils import Split

    prefix = str(source.tokens.prefix)
    corpus = GPTDataset.build_low_level_dataset(prefix, config)
    # A training split drops the rest that fills no row. (The others count rows in float32: wrong from 2^24 tokens on.)
    return GPTDataset(corpus, prefix, source.documents_N, num_samples, Split.train, config)


def _with_rest(source: CorpusSource, dataset: "GPTDataset") -> np.ndarray:
    """The sample index with a last, shorter row of what is left."""
    samples, last = dataset.sample_index, len(dataset.document_index) - 1
    end = (last, int(source.tokens.lengths_D[dataset.document_index[last]]) - 1)
    return samples if tuple(samples[-1]) == end else np.concatenate([samples, np.array([end], dtype=samples.dtype)])


def _config(sources: Sequence[CorpusSource], sequence_length: int, seed: int, cache: Path) -> "GPTDatasetConfig":
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    # Of a tokenizer only indices are built here, for which it needs neither ids nor a vocabulary.
    tokenizer: Any = SimpleNamespace(vocab_size=None, unique_identifiers={})
    return GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        blend_per_split=[([str(source.tokens.prefix) for source in sources], None), None, None],
        path_to_cache=str(cache),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=tokenizer,
    )
