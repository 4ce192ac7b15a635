"""The job `dataset`: files of text rows become a token store with statistics and a preview.

    validate ──> encode ──> split ──> shuffle, cut, pack ──> write ──> digest
    (no torch)   (workers)  (no equal rows on two sides)

    <output>/train/ eval/    token stores (`mca_lib/data/token_store.py`); eval only where rows are held out. With
                             `storage: indexed`, train is in Megatron's format (`mca_lib/data/indexed.py`)
    <output>/meta.json       what a reader of the store needs to know
    <output>/stats.json      counts
    <output>/preview.md      the same for people, and documents with their loss marked

The tokens depend on the spec, the data and the tokenizer alone; not on workers, time, or the names of folders.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from mca_lib.data.alignment import Sample
from mca_lib.data.assembly import write_split
from mca_lib.data.encoding import EncodingLimits, TextEncoder, encode_samples
from mca_lib.data.formats import resolve_sources, shows_images
from mca_lib.data.images import with_marks
from mca_lib.data.outcome import EQUAL_TO_HELD_OUT, Outcome, refuse_losses
from mca_lib.data.preview import render_preview
from mca_lib.data.rows import Summary, read_samples, validate_sources
from mca_lib.data.spec import TOKENIZING_LIBRARIES, DatasetSpec
from mca_lib.data.spill import Spill
from mca_lib.data.split import hold_out, permutation
from mca_lib.data.statistics import dataset_digest, split_digest, split_statistics
from mca_lib.data.token_store import TokenStore
from mca_lib.errors import DataError
from mca_lib.tokenizer import load_tokenizer, tokenizer_size

FORMAT = 1

type Progress = Callable[..., None]


def dataset(spec: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Build the data set that `spec` (see `DatasetSpec`) asks for.

    Args:
        progress: `progress(done, total, **metrics)`, in rows.

    Returns:
        {"digest": semantic digest, "parts": {split: digest}, "stats": {...}}

    Raises:
        ConfigError, DataError, ModelError: as the message says; before anything expensive where possible.
    """
    job = DatasetSpec.from_dict(spec)
    indexed = job.storage == "indexed"
    summary = None if indexed else validate_sources(job, job.objective)
    tokenizer = _load_tokenizer(job)
    if job.resize_vocabulary:
        job = replace(job, vocab_size=max(job.vocab_size, tokenizer_size(tokenizer)))
    encoder = _build_encoder(job, tokenizer)
    output = Path(job.output)
    output.mkdir(parents=True, exist_ok=True)
    if summary is None:
        from mca_lib.data.indexed import indexed_dataset

        stats, preview, parts = indexed_dataset(job, tokenizer)
    else:
        stats, preview, parts = _rows_dataset(job, summary, tokenizer, encoder, progress)
    _write_json(output / "meta.json", _meta(job, tokenizer, encoder))
    _write_json(output / "stats.json", stats)
    (output / "preview.md").write_text(preview, encoding="utf-8")
    return {"digest": dataset_digest(parts), "parts": parts, "stats": stats}


def _rows_dataset(
    job: DatasetSpec, summary: Summary, tokenizer: Any, encoder: Any, progress: Progress
) -> tuple[dict[str, Any], str, dict[str, str]]:
    """Write token stores. Returns (statistics, preview, digest of each split)."""
    output = Path(job.output)
    with Spill(output / ".spill") as spill:
        outcome = _encode(job, summary, encoder, spill, progress)
        stores = _write_splits(job, spill, outcome, output)
    stats, pairs = _statistics(job, summary, outcome, stores), job.objective == "dpo"
    preview = render_preview(
        stats, stores["train"], lambda ids: with_marks(tokenizer.decode(ids, skip_special_tokens=False)), pairs=pairs
    )
    return stats, preview, {name: split_digest(store, pairs=pairs) for name, store in stores.items()}


def _load_tokenizer(job: DatasetSpec) -> Any:
    tokenizer = load_tokenizer(job.tokenizer_dir)
    # Long texts are cut here, by our own rule; the tokenizer's warning about them would be noise.
    tokenizer.model_max_length = 2**62
    return tokenizer


def _build_encoder(job: DatasetSpec, tokenizer: Any) -> Any:
    if job.objective == "pt":
        return TextEncoder(tokenizer)
    # Here, because it imports LLaMA-Factory, which takes seconds and is not needed for plain text.
    from mca_lib.data.llamafactory import ChatEncoder, ChatOptions, PairEncoder

    kind = PairEncoder if job.objective == "dpo" else ChatEncoder
    encoder = kind(
        tokenizer,
        ChatOptions(
            template=str(job.template),
            train_on_prompt=job.train_on_prompt,
            mask_history=job.mask_history,
            default_system=job.default_system,
            enable_thinking=job.enable_thinking,
        ),
    )
    if shows_images(resolve_sources(job, job.objective)):
        from mca_lib.data.images import ImageReader
        from mca_lib.models.vision.processor import load_processor

        processor = load_processor(job.tokenizer_dir, job.min_pixels, job.max_pixels)
        encoder.reader = ImageReader(processor, tokenizer)
    return encoder


def _encode(job: DatasetSpec, summary: Summary, encoder: Any, spill: Spill, progress: Progress) -> Outcome:
    """Encode the drawn rows into `spill`. Raises DataError when too few are left."""
    drawn = summary.kept["train"]
    if job.max_rows is not None:
        drawn = min(drawn, job.max_rows)
    total = drawn + summary.kept["eval"]
    outcome = Outcome(not_drawn=summary.kept["train"] - drawn)
    limits = EncodingLimits(None if job.objective == "pt" else job.cutoff_len, job.vocab_size)
    started, done = time.monotonic(), 0
    progress(0, total)
    for chunk in encode_samples(_drawn_samples(job, summary, drawn), encoder, limits, job.num_workers):
        spill.add(chunk)
        outcome.add(chunk)
        done += len(chunk.lengths_N) + len(chunk.dropped) + len(chunk.bad)
        progress(done, total, rows_per_second=round(done / max(time.monotonic() - started, 1e-3), 1))
    spill.freeze()
    if done != total:
        raise DataError(f"the data files changed while they were read: {done} rows instead of {total}; run again")
    refuse_losses(job, summary, outcome, total)
    named = [*outcome.named_bad, *outcome.named]
    if job.eval_files and not np.any(spill.held_out):
        raise DataError(f"no row of dataset.eval_files is left; first: {[*summary.named, *named][0]}")
    if not np.any(~spill.held_out):
        reasons = ", ".join(f"{n} × {reason}" for reason, n in (outcome.bad + outcome.dropped).most_common())
        raise DataError(f"no training row is left ({reasons}); first: {named[0]}")
    return outcome


def _drawn_samples(job: DatasetSpec, summary: Summary, count: int) -> Iterator[Sample]:
    """The usable rows in file order: `count` of the training rows, drawn with the seed, and all of the eval files."""
    chosen = np.zeros(summary.kept["train"], dtype=bool)
    chosen[permutation(len(chosen), job.seed, "max_rows")[:count]] = True
    index = 0
    for row in read_samples(resolve_sources(job, job.objective)):
        if not isinstance(row, Sample):
            continue
        if row.split == "eval":
            yield row
            continue
        if index < len(chosen) and chosen[index]:
            yield row
        index += 1


def _write_splits(job: DatasetSpec, spill: Spill, outcome: Outcome, output: Path) -> dict[str, TokenStore]:
    held_out = spill.held_out
    left_out = np.zeros(len(spill), dtype=bool)
    if job.eval_files:
        secret = {spill.digests[index] for index in np.flatnonzero(held_out)}
        for index in np.flatnonzero(~held_out):
            left_out[index] = spill.digests[index] in secret
        outcome.dropped.update({EQUAL_TO_HELD_OUT: int(left_out.sum())} if left_out.any() else {})
        if not np.any(~held_out & ~left_out):
            raise DataError("every training row is equal to a row of dataset.eval_files; hold out other rows")
    else:
        held_out = hold_out(spill.digests, spill.contents, job.eval_fraction, job.seed)
    splits = {"train": np.flatnonzero(~held_out & ~left_out), "eval": np.flatnonzero(held_out)}
    return {
        name: write_split(output / name, spill, samples, cutoff_len=job.cutoff_len, packing=job.packing, seed=job.seed)
        for name, samples in splits.items()
        if len(samples)
    }


def _statistics(job: DatasetSpec, summary: Summary, outcome: Outcome, stores: dict[str, TokenStore]) -> dict[str, Any]:
    return {
        "rows": outcome.rows(summary),
        "named_rows": outcome.named_rows(summary),
        "splits": {
            name: split_statistics(store, job.cutoff_len, pairs=job.objective == "dpo")
            for name, store in stores.items()
        },
        "cutoff_len": job.cutoff_len,
        "vocab_size": job.vocab_size,
    }


def _meta(job: DatasetSpec, tokenizer: Any, encoder: Any) -> dict[str, Any]:
    return {
        **_image_meta(encoder.reader),
        "format": FORMAT,
        "objective": job.objective,
        "template": job.template,
        "cutoff_len": job.cutoff_len,
        "packing": job.packing,
        "storage": job.storage,
        "vocab_size": job.vocab_size,
        "pad_token_id": tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        "stop_token_ids": encoder.stop_token_ids,
        "libraries": {name: version(name) for name in TOKENIZING_LIBRARIES},
    }


def _image_meta(reader: Any | None) -> dict[str, Any]:
    """How whoever reads the store makes pixels of its images."""
    if reader is None:
        return {}
    from mca_lib.models.vision.processor import settings

    return {"image_token_id": reader.token_id, "image_processor": settings(reader.processor)}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
