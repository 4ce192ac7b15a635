"""Samples to tokens and loss masks, in one process or several, always in the order of the samples.

    sft    the conversation as the template renders it; loss on the answers
    pt     [bos] text eos; loss everywhere; the store later cuts it into blocks
    dpo    the conversation twice, with the chosen and with the rejected answer; loss on that answer

An over-long conversation keeps its first `cutoff_len` tokens: a prefix of a correct rendering, in which every label
still has its true context; one that would end within an image ends before it. One that loses all its labels by that is
dropped and counted, as is one without any. So is a pair of which one answer loses all its labels, or whose answers
differ only in what is cut off. The two of a pair are cut each by itself, and as both begin with the prompt, both keep
the same part of it.
"""

import ctypes
import json
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import batched
from typing import Any, Protocol

import numpy as np
from blake3 import blake3

from mca_lib.data.alignment import Sample, UnusableRow
from mca_lib.data.control_tokens import GuardedTokenizer
from mca_lib.data.images import ImageFile, ImageReader
from mca_lib.errors import ConfigError, DataError

CHUNK = 256
"""Samples per piece of work."""
DIGEST_BYTES = 16
PR_SET_PDEATHSIG = 1

NO_LOSS = "no tokens with loss"
CUT_OFF = "all tokens with loss lie beyond cutoff_len"
EQUAL_ANSWERS = "chosen and rejected are equal up to cutoff_len"

type Encoded = tuple[list[int], list[bool]]
"""(ids, loss mask) of one document."""


class Encoder(Protocol):
    """One sample to its documents, untruncated: one, or of a pair the chosen and the rejected. Raises UnusableRow."""

    reader: ImageReader | None
    """Of images, where samples have some."""

    def encode(self, sample: Sample) -> list[Encoded]: ...


class TextEncoder:
    """Plain text for pretraining; nothing in it becomes a control token."""

    reader: ImageReader | None = None

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise ConfigError("training.stage: pt needs an eos token to end documents, and the tokenizer has none")
        self._guard = GuardedTokenizer(tokenizer)
        self.stop_token_ids: list[int] = [tokenizer.eos_token_id]
        # Fast tokenizers add bos in their post-processor and need not carry `add_bos_token`.
        starts_with_bos = tokenizer.bos_token_id is not None and tokenizer.bos_token_id in tokenizer.encode("a")[:1]
        self._prefix = [tokenizer.bos_token_id] if starts_with_bos else []

    def encode(self, sample: Sample) -> list[Encoded]:
        ids = self._prefix + self._guard.encode_plain(sample.messages[0].content) + self.stop_token_ids
        return [(ids, [True] * len(ids))]


@dataclass(frozen=True)
class EncodingLimits:
    """What every encoded sample must satisfy."""

    cutoff_len: int | None
    """Truncate to so many tokens; None: not at all."""
    vocab_size: int


@dataclass(frozen=True)
class EncodedChunk:
    """Some consecutive samples, end to end."""

    tokens_T: np.ndarray
    """int32 [T]."""
    mask_T: np.ndarray
    """bool [T]."""
    lengths_N: np.ndarray
    """int64 [N]: tokens of each sample that is kept, of a pair of both documents."""
    first_N: np.ndarray
    """int64 [N]: tokens of the sample's first document, which is all of it but in a pair."""
    held_out_N: np.ndarray
    """bool [N]: the sample is of the eval files."""
    contents: list[bytes]
    """Digest of the text, and of the images, of each sample that is kept."""
    images: list[tuple[ImageFile, ...]]
    """Of each sample that is kept."""
    truncated: int
    dropped: list[tuple[str, str]]
    """(reason, place) per usable sample that is not kept."""
    bad: list[tuple[str, str, str]]
    """(reason, detail, place) per sample that turned out to be unusable."""


def encode_samples(
    samples: Iterable[Sample], encoder: Encoder, limits: EncodingLimits, num_workers: int
) -> Iterator[EncodedChunk]:
    """Encode in chunks, in order. The result does not depend on `num_workers`.

    Raises:
        DataError: a token id is not in the model's vocabulary.
    """
    chunks = batched(samples, CHUNK)
    if num_workers == 1:
        yield from (encode_chunk(chunk, encoder, limits) for chunk in chunks)
        return
    # Forked, so that workers do not import again; the encoder reaches them as memory, not as a pickle.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_workers, context, _start_worker, (os.getpid(), encoder, limits)) as pool:
        yield from _in_order(pool.submit, chunks, ahead=2 * num_workers)


def encode_chunk(samples: Sequence[Sample], encoder: Encoder, limits: EncodingLimits) -> EncodedChunk:
    """Encode some samples in this process. Raises DataError for an id beyond the vocabulary."""
    tokens: list[int] = []
    mask: list[bool] = []
    lengths: list[int] = []
    first: list[int] = []
    held_out: list[bool] = []
    contents: list[bytes] = []
    images: list[tuple[ImageFile, ...]] = []
    dropped: list[tuple[str, str]] = []
    bad: list[tuple[str, str, str]] = []
    truncated = 0
    for sample in samples:
        shown: tuple[ImageFile, ...] = ()
        try:
            whole = encoder.encode(sample)
            if sample.images:
                shown = tuple(encoder.reader.look(path) for path in sample.images)
        except UnusableRow as problem:
            bad.append((problem.reason, problem.detail, sample.where))
            continue
        for ids, _ in whole:
            _refuse_foreign_ids(ids, limits.vocab_size, sample.where)
        limit = limits.cutoff_len
        if shown and limit is not None:
            limit, shown = encoder.reader.fitting(whole[0][0], shown, limit)
        kept = [(ids[:limit], loss[:limit]) for ids, loss in whole]
        if reason := _why_dropped(whole, kept):
            dropped.append((reason, sample.where))
            continue
        truncated += any(len(ids) < len(all_ids) for (ids, _), (all_ids, _) in zip(kept, whole, strict=True))
        for ids, loss in kept:
            tokens += ids
            mask += loss
        lengths.append(sum(len(ids) for ids, _ in kept))
        first.append(len(kept[0][0]))
        held_out.append(sample.split == "eval")
        contents.append(_content_digest(sample, shown))
        images.append(shown)
    return EncodedChunk(
        np.array(tokens, dtype=np.int32),
        np.array(mask, dtype=bool),
        np.array(lengths, dtype=np.int64),
        np.array(first, dtype=np.int64),
        np.array(held_out, dtype=bool),
        contents,
        images,
        truncated,
        dropped,
        bad,
    )


def _why_dropped(whole: Sequence[Encoded], kept: Sequence[Encoded]) -> str:
    """Why a sample of these documents, before and after truncation, is not kept; "" when it is."""
    for (_, all_loss), (_, loss) in zip(whole, kept, strict=True):
        # The first token has no predecessor that could predict it.
        if not any(loss[1:]):
            return CUT_OFF if any(all_loss[1:]) else NO_LOSS
    return EQUAL_ANSWERS if len(kept) == 2 and kept[0] == kept[1] else ""


def _content_digest(sample: Sample, images: Sequence[ImageFile]) -> bytes:
    further = [sample.rejected] if sample.rejected else [image.digest for image in images]
    text = json.dumps([sample.messages, sample.system, sample.tools, *further])
    return blake3(text.encode("ascii")).digest(length=DIGEST_BYTES)


def _refuse_foreign_ids(ids: list[int], vocab_size: int, where: str) -> None:
    largest = max(ids, default=0)
    if largest >= vocab_size or min(ids, default=0) < 0:
        raise DataError(
            f"{where}: token id {largest} is not in the model's vocabulary of {vocab_size}; "
            "the tokenizer does not belong to this model, or needs rows of checkpoint.resize_vocabulary: true"
        )


_worker_state: tuple[Encoder, EncodingLimits] | None = None


def _start_worker(parent: int, encoder: Encoder, limits: EncodingLimits) -> None:
    global _worker_state
    # A worker waits on a pipe that its siblings hold open too, so it would not notice that the parent is gone.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    _worker_state = encoder, limits


def _encode_in_worker(chunk: Sequence[Sample]) -> EncodedChunk:
    assert _worker_state is not None
    return encode_chunk(chunk, *_worker_state)


def _in_order(
    submit: Callable[..., Future[EncodedChunk]], chunks: Iterable[Sequence[Sample]], ahead: int
) -> Iterator[EncodedChunk]:
    """Results in the order of the chunks, with at most `ahead` chunks in flight."""
    pending: deque[Future[EncodedChunk]] = deque()
    for chunk in chunks:
        pending.append(submit(_encode_in_worker, chunk))
        if len(pending) > ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
