"""The job `dataset` where `storage` is `indexed`: plain text, or corpora in Megatron's format, for pretraining.

    text     validate ──> tokenize in parts (datatrove) ──> hold out, merge ──> Megatron's indices
    indexed                              check, read once ──> hold out ──────> Megatron's indices

    <output>/train/                      corpora and indices (`mca_lib/data/indexed_rows.py`)
    <output>/eval/                       a token store: held-out documents are few, and all that measures reads one
    meta.json, stats.json, preview.md    as of a token store

Held out are the documents that a token store would hold out, at most `MAX_HELD_OUT`. Memory: 8 bytes a document, the
indices, and the held-out tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mca_lib.data.assembly import write_split
from mca_lib.data.given_corpora import gather_given
from mca_lib.data.indexed_split import indexed_digest, indexed_statistics, write_indexed_split
from mca_lib.data.preview import render_preview
from mca_lib.data.spec import DatasetSpec
from mca_lib.data.statistics import split_digest, split_statistics


def indexed_dataset(job: DatasetSpec, tokenizer: Any) -> tuple[dict[str, Any], str, dict[str, str]]:
    """Write both splits.

    Returns:
        (statistics, preview, digest of each split)

    Raises:
        ConfigError, DataError: as the message says.
    """
    train = Path(job.output, "train")
    train.mkdir(parents=True, exist_ok=True)
    if job.formatting == "indexed":
        gathered = gather_given(job)
    else:
        # Here, because datatrove takes a second to import.
        from mca_lib.data.text_corpora import gather_text

        gathered = gather_text(job)
    rows = write_indexed_split(train, gathered.corpora, sequence_length=job.cutoff_len, seed=job.seed)
    splits = {"train": indexed_statistics(rows, gathered.corpora, job.cutoff_len)}
    parts = {"train": indexed_digest(train, gathered.corpora)}
    if gathered.held_out:
        path, numbers = Path(job.output, "eval"), np.arange(len(gathered.held_out))
        held_out = _HeldOut(gathered.held_out)
        store = write_split(path, held_out, numbers, cutoff_len=job.cutoff_len, packing=True, seed=job.seed)
        splits["eval"], parts["eval"] = split_statistics(store, job.cutoff_len), split_digest(store)
    stats = {
        "rows": gathered.outcome.rows(gathered.summary),
        "named_rows": gathered.outcome.named_rows(gathered.summary),
        "splits": splits,
        "cutoff_len": job.cutoff_len,
        "vocab_size": job.vocab_size,
    }
    preview = render_preview(stats, rows, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
    return stats, preview, parts


class _HeldOut:
    """Documents as `write_split` reads them."""

    def __init__(self, documents: Sequence[np.ndarray]) -> None:
        self._documents = documents
        self.images = [()] * len(documents)
        self.lengths = self.first = np.array([len(tokens) for tokens in documents], dtype=np.int64)

    def piece(self, sample: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        return self._documents[sample][start:end], np.ones(end - start, dtype=bool)
