"""Corpora that the user has in Megatron's format: read once to check them, then used where they are.

There is no text to hold out by, so random documents are held out; equal documents are not looked for.
"""

import numpy as np

from mca_lib.data.formats import Source, resolve_sources
from mca_lib.data.gathered import MAX_HELD_OUT, Gathered, files_digest, take_documents
from mca_lib.data.indexed_format import Indexed, open_indexed
from mca_lib.data.indexed_split import CorpusSource
from mca_lib.data.outcome import Outcome
from mca_lib.data.rows import Summary
from mca_lib.data.spec import DatasetSpec
from mca_lib.data.split import permutation
from mca_lib.data.storage import corpora
from mca_lib.errors import DataError


def gather_given(job: DatasetSpec) -> Gathered:
    """The corpora that `job` names. Raises ConfigError or DataError."""
    sources = resolve_sources(job, job.objective)
    files = corpora(job, sources)
    opened = [_checked(corpus.sources[0], job.vocab_size) for corpus in files]
    counts = [len(tokens.lengths_D) for tokens, _ in opened]
    used = permutation(sum(counts), job.seed, "max_rows")[: job.max_rows]
    used, secret = _hold_out(used, job)
    firsts = np.cumsum([0, *counts]).tolist()
    gathered, held_out = [], []
    for number, (corpus, (tokens, largest)) in enumerate(zip(files, opened, strict=True)):
        path, first, end = corpus.sources[0].path, firsts[number], firsts[number + 1]
        chosen = used[(used >= first) & (used < end)] - first
        if not len(chosen):
            raise DataError(f"{path}: no document of it is left for training; leave the file out, or use more rows")
        held_out += take_documents(tokens, secret[(secret >= first) & (secret < end)] - first)
        digest = job.file_digests.get(str(path.resolve())) or files_digest(tokens.prefix)
        name, documents = f"corpus-{number}", chosen.astype(np.int32)
        gathered.append(CorpusSource(name, corpus.label, tokens, documents, corpus.weight, digest, largest))
    for source in sources:
        if source.split == "eval":
            tokens, _ = _checked(source, job.vocab_size)
            held_out += take_documents(tokens, np.arange(len(tokens.lengths_D)))
    outcome = Outcome(not_drawn=firsts[-1] - len(used) - len(secret))
    return Gathered(gathered, held_out, Summary(firsts[-1], {"train": firsts[-1]}, {}, ()), outcome)


def _hold_out(documents_N: np.ndarray, job: DatasetSpec) -> tuple[np.ndarray, np.ndarray]:
    """(documents to train on, documents held out), each in order."""
    wanted = 0
    if not job.eval_files and job.eval_fraction and len(documents_N) > 1:
        wanted = min(max(1, round(job.eval_fraction * len(documents_N))), len(documents_N) - 1, MAX_HELD_OUT)
    order = documents_N[permutation(len(documents_N), job.seed, "held out")]
    return np.sort(order[wanted:]), np.sort(order[:wanted])


def _checked(source: Source, vocab_size: int) -> tuple[Indexed, int]:
    """A corpus and its largest id. Raises DataError when the model has no row for that."""
    tokens = open_indexed(source.path.resolve().with_suffix(""))
    largest = tokens.check()
    if largest >= vocab_size:
        raise DataError(
            f"{source.path}: token id {largest} is not in the model's vocabulary of {vocab_size}; "
            "it was made with another tokenizer"
        )
    return tokens, largest
