"""Plain text becomes corpora in Megatron's format: tokenized in parts, which are merged without held-out documents."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mca_lib.data.formats import Source, resolve_sources
from mca_lib.data.gathered import MAX_HELD_OUT, Gathered, files_digest, take_documents
from mca_lib.data.indexed_format import Indexed, open_indexed, token_dtype, write_index
from mca_lib.data.indexed_split import CorpusSource
from mca_lib.data.outcome import EQUAL_TO_HELD_OUT, Outcome, refuse_losses
from mca_lib.data.rows import Sample, Summary, read_samples, validate_sources
from mca_lib.data.shards import cut_sources, write_shards
from mca_lib.data.spec import DatasetSpec
from mca_lib.data.split import held_out_keys, permutation
from mca_lib.data.storage import CorpusFiles, corpora
from mca_lib.data.tokenization import DRAWN, LOG, SHARDS, TOKENS, tokenize
from mca_lib.errors import DataError


@dataclass(frozen=True)
class Part:
    """A tokenized part of the data files."""

    source: Source
    tokens: Indexed | None
    """None where no document of it is kept."""
    keys_D: np.ndarray
    """uint64 [D]: of the texts (`hold_out_keys`)."""
    outcome: dict[str, Any]


def gather_text(job: DatasetSpec) -> Gathered:
    """Corpora of the text that `job` names, written into the training split. Raises ConfigError or DataError."""
    summary = validate_sources(job, job.objective)
    sources = resolve_sources(job, job.objective)
    work = Path(job.work) if job.work else Path(job.output, ".work")
    work.mkdir(exist_ok=True)
    shards = cut_sources(sources)
    if not write_shards(work / SHARDS, shards):  # an earlier attempt, if any, had cut the files in another way
        for folder in (DRAWN, TOKENS, LOG):
            shutil.rmtree(work / folder, ignore_errors=True)
    drawn = _draw(job, summary, shards, work)
    tokenize(job, work, len(shards))
    parts = [_read_part(work / TOKENS, number, shard) for number, shard in enumerate(shards)]
    outcome = Outcome(not_drawn=summary.kept["train"] - drawn)
    for part in parts:
        outcome.merge(part.outcome)
    total = drawn + summary.kept["eval"]
    if outcome.seen != total:
        raise DataError(
            f"the data files changed while they were read: {outcome.seen} rows instead of {total}; run again"
        )
    refuse_losses(job, summary, outcome, total)
    secret = _held_out(job, parts, outcome)
    output = Path(job.output, "train")
    files = corpora(job, sources)
    gathered = [_merge(output / f"corpus-{n}", corpus, parts, secret, job) for n, corpus in enumerate(files)]
    side = "eval" if job.eval_files else "train"
    held_out = [document for part in parts if part.source.split == side for document in _secret(part, secret)]
    if not job.work:
        shutil.rmtree(work)
    return Gathered(gathered, held_out, summary, outcome)


def _draw(job: DatasetSpec, summary: Summary, shards: Sequence[Source], work: Path) -> int:
    """Leave word of which training rows are used, where not all are. Returns their number."""
    rows = summary.kept["train"]
    if job.max_rows is None or job.max_rows >= rows:
        return rows
    chosen = np.zeros(rows, dtype=bool)
    chosen[permutation(rows, job.seed, "max_rows")[: job.max_rows]] = True
    (work / DRAWN).mkdir(exist_ok=True)
    first = 0
    for number, shard in enumerate(shards):
        if shard.split == "train":
            count = sum(isinstance(sample, Sample) for sample in read_samples([shard]))
            np.save(work / DRAWN / f"{number:05d}.npy", chosen[first : first + count])
            first += count
    return job.max_rows


def _read_part(folder: Path, number: int, source: Source) -> Part:
    keys_D = np.load(folder / f"{number:05d}_keys.npy")
    outcome = json.loads((folder / f"{number:05d}.json").read_text(encoding="utf-8"))
    tokens = open_indexed(folder / f"{number:05d}_tokens") if len(keys_D) else None
    return Part(source, tokens, keys_D, outcome)


def _held_out(job: DatasetSpec, parts: Sequence[Part], outcome: Outcome) -> np.ndarray:
    """Keys of the held-out documents, sorted. Training documents equal to a row of the eval files are dropped."""
    keys = {
        split: np.concatenate([np.zeros(0, np.uint64), *(p.keys_D for p in parts if p.source.split == split)])
        for split in ("train", "eval")
    }
    if not len(keys["train"]):
        raise DataError(f"no training row is left; first: {[*outcome.named_bad, *outcome.named][0]}")
    if not job.eval_files:
        return held_out_keys(keys["train"], job.eval_fraction, MAX_HELD_OUT)
    if not len(keys["eval"]):
        raise DataError(f"no row of dataset.eval_files is left; first: {[*outcome.named_bad, *outcome.named][0]}")
    secret = np.unique(keys["eval"])
    left_out = int(np.isin(keys["train"], secret).sum())
    if left_out:
        outcome.dropped[EQUAL_TO_HELD_OUT] = left_out
    return secret


def _merge(
    prefix: Path, corpus: CorpusFiles, parts: Sequence[Part], secret: np.ndarray, job: DatasetSpec
) -> CorpusSource:
    """One corpus of its parts in order, without the held-out documents."""
    paths = {source.path for source in corpus.sources}
    dtype = token_dtype(job.vocab_size)
    lengths: list[np.ndarray] = [np.zeros(0, dtype=np.int32)]
    largest = 0
    with prefix.with_name(f"{prefix.name}.bin").open("wb") as file:
        for part in parts:
            if part.tokens is None or part.source.split != "train" or part.source.path not in paths:
                continue
            kept_D = ~np.isin(part.keys_D, secret)
            for tokens in _runs(part.tokens, kept_D):
                file.write(tokens.data)
            lengths.append(part.tokens.lengths_D[kept_D])
            largest = max(largest, int(part.tokens.tokens_T.max()))
    lengths_D = np.concatenate(lengths)
    if not len(lengths_D):
        raise DataError(
            f"dataset: no document of {corpus.label!r} is left for training; hold out fewer, or leave it out"
        )
    write_index(prefix.with_name(f"{prefix.name}.idx"), lengths_D, dtype)
    documents_D = np.arange(len(lengths_D), dtype=np.int32)
    digest = files_digest(prefix)
    return CorpusSource(prefix.name, corpus.label, open_indexed(prefix), documents_D, corpus.weight, digest, largest)


def _runs(corpus: Indexed, kept_D: np.ndarray) -> list[np.ndarray]:
    """Tokens of the kept documents, in as few pieces as lie end to end."""
    borders = np.flatnonzero(np.diff(kept_D, prepend=False, append=False)).reshape(-1, 2)
    ends_D = np.cumsum(corpus.lengths_D, dtype=np.int64)
    return [corpus.tokens_T[int(corpus.starts(first)) : int(ends_D[last - 1])] for first, last in borders.tolist()]


def _secret(part: Part, secret: np.ndarray) -> list[np.ndarray]:
    """Tokens of the part's held-out documents."""
    return [] if part.tokens is None else take_documents(part.tokens, np.flatnonzero(np.isin(part.keys_D, secret)))
