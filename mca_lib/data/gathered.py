"""What an indexed data set is made of, before Megatron's indices are built."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from mca_lib.data.indexed_format import Indexed
from mca_lib.data.indexed_split import CorpusSource
from mca_lib.data.outcome import Outcome
from mca_lib.data.rows import Summary

MAX_HELD_OUT = 10_000
"""Documents; an evaluation of more says hardly more and takes long. `eval_files` are used whole."""


@dataclass(frozen=True)
class Gathered:
    """Corpora to train on and what was held out."""

    corpora: list[CorpusSource]
    held_out: list[np.ndarray]
    """Tokens of each held-out document."""
    summary: Summary
    outcome: Outcome


def take_documents(corpus: Indexed, documents_N: Sequence[int] | np.ndarray) -> list[np.ndarray]:
    """Copies of the tokens of some documents."""
    starts_N = corpus.starts(np.asarray(documents_N, dtype=np.int64))
    lengths_N = corpus.lengths_D[documents_N]
    return [np.array(corpus.tokens_T[a : a + n]) for a, n in zip(starts_N.tolist(), lengths_N.tolist(), strict=True)]


def files_digest(prefix: Path) -> str:
    """BLAKE3 over the .bin and the .idx of a corpus."""
    hasher = blake3(max_threads=blake3.AUTO)
    for suffix in (".bin", ".idx"):
        hasher.update_mmap(prefix.with_name(prefix.name + suffix))
    return hasher.hexdigest()
