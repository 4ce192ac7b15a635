"""Plain text into tokens by datatrove: one task per part of the data files, here, on Slurm or on Ray.

    <work>/shards.jsonl                   the parts, in order (mca_lib/data/shards.py)
    <work>/drawn/00000.npy                bool: which rows of the part are used, where `max_rows` draws some
    <work>/tokens/00000_tokens.bin .idx   documents of a part that are kept, in Megatron's format
    <work>/tokens/00000_keys.npy          uint64 [D]: of the text of each document, see `mca_lib/data/split.py`
    <work>/tokens/00000.json              what became of the other rows
    <work>/log/completions/00000          the part is done: a killed run goes on with the others

The parts follow from the data files alone and are merged in their order, so workers decide nothing but speed.
Documents are those of the token store: the same reader, rules and encoder. datatrove's own tokenizer step differs: it
lets control tokens of the text through, knows no BOS and no token without a row in the model, and keeps documents of
one token.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile

from mca_lib.data.alignment import Message, Sample
from mca_lib.data.encoding import CHUNK, EncodingLimits, TextEncoder, encode_chunk
from mca_lib.data.indexed_format import token_dtype
from mca_lib.data.outcome import Outcome
from mca_lib.data.rows import read_samples
from mca_lib.data.shards import read_shard
from mca_lib.data.spec import DatasetSpec
from mca_lib.data.split import hold_out_keys
from mca_lib.data.storage import check_executor
from mca_lib.errors import ConfigError, DataError
from mca_lib.job import progress_writer
from mca_lib.tokenizer import load_tokenizer

SHARDS, DRAWN, TOKENS, LOG = "shards.jsonl", "drawn", "tokens", "log"
POLL_SECONDS = 2.0


class ReadRows(PipelineStep):
    """The usable rows of this task's part, as documents; those that are drawn where `max_rows` says how many."""

    name, type = "rows", "📖 - READER"

    def __init__(self, work: str) -> None:
        super().__init__()
        self.work = work

    def run(self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        shard = read_shard(Path(self.work, SHARDS), rank)
        drawn = Path(self.work, DRAWN, f"{rank:05d}.npy")
        chosen = np.load(drawn) if drawn.exists() else None
        samples = (sample for sample in read_samples([shard]) if isinstance(sample, Sample))
        for index, sample in enumerate(samples):
            if chosen is None or (index < len(chosen) and chosen[index]):
                yield Document(text=sample.messages[0].content, id=sample.where)


class WriteTokens(PipelineStep):
    """Encodes documents as the token store has them and writes the part's files."""

    name, type = "tokens", "🔢 - TOKENIZER"

    def __init__(self, work: str, tokenizer_dir: str, vocab_size: int, seed: int) -> None:
        super().__init__()
        self.work, self.tokenizer_dir, self.vocab_size, self.seed = work, tokenizer_dir, vocab_size, seed

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> None:
        folder = Path(self.work, TOKENS)
        encoder, limits = text_encoder(self.tokenizer_dir), EncodingLimits(None, self.vocab_size)
        file = MegatronTokenizedFile(
            str(folder), f"{rank:05d}_tokens", token_size=token_dtype(self.vocab_size).itemsize
        )
        outcome, keys = Outcome(), []
        for documents in batched(data, CHUNK):
            samples = [Sample((Message("user", document.text),), where=document.id) for document in documents]
            chunk = encode_chunk(samples, encoder, limits)
            outcome.add(chunk)
            keys.append(hold_out_keys(chunk.contents, self.seed))
            for tokens in np.split(chunk.tokens_T, np.cumsum(chunk.lengths_N)[:-1]):
                if len(tokens):
                    file.write(tokens)
        file.close()
        np.save(folder / f"{rank:05d}_keys.npy", np.concatenate([np.zeros(0, dtype=np.uint64), *keys]))
        (folder / f"{rank:05d}.json").write_text(json.dumps(vars(outcome)), encoding="utf-8")
        done = len(list(Path(self.work, LOG, "completions").glob("*"))) + 1
        progress_writer()(min(done, world_size), world_size)


class SlurmExecutor(SlurmPipelineExecutor):
    """datatrove's, as one call that ends with the job. Its name is that of the work folder: what a killed run left in
    the queue is cancelled first, so that no file has two writers."""

    def run(self) -> None:
        if "SLURM_ARRAY_TASK_ID" in os.environ:  # in the job
            super().run()
            return
        self._cancel()
        try:
            super().run()
            while self._queued():
                time.sleep(POLL_SECONDS)
        except BaseException:
            self._cancel()
            raise

    def launch_merge_stats(self) -> None:
        """Nobody reads merged statistics here, and the job for it asks for 1 GB."""

    def _cancel(self) -> None:
        subprocess.run(["scancel", "--name", self.job_name], check=True)
        while self._queued():
            time.sleep(1)

    def _queued(self) -> bool:
        """A controller that does not answer for a while is no reason to give the job up."""
        found = subprocess.run(["squeue", "--noheader", "--name", self.job_name], capture_output=True, text=True)
        return found.returncode != 0 or bool(found.stdout.strip())


@functools.cache
def text_encoder(tokenizer_dir: str) -> TextEncoder:
    """One per process; forked workers find it there."""
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.model_max_length = 2**62  # long texts are cut later; the warning would be noise
    return TextEncoder(tokenizer)


def build_executor(
    settings: Mapping[str, Any], workers: int, steps: list[PipelineStep], tasks: int, work: Path
) -> PipelineExecutor:
    """datatrove's executor for a recipe's `dataset.executor`.

    Args:
        settings: fields of `tasks.dataset.ExecutorConfig`.
        workers: tasks that run at the same time.

    Raises:
        ConfigError: it needs a program or package that is not installed.
    """
    check_executor(settings["kind"])
    common = {"pipeline": steps, "tasks": tasks, "workers": workers, "logging_dir": str(work / LOG)}
    if settings["kind"] == "local":
        return LocalPipelineExecutor(**common, start_method="fork")
    if settings["kind"] == "ray":
        return RayPipelineExecutor(**common, mem_per_cpu_gb=settings["mem_per_cpu_gb"], time=settings["time"])
    return SlurmExecutor(
        **common,
        time=settings["time"],
        partition=settings["partition"],
        qos=settings["qos"],
        mem_per_cpu_gb=settings["mem_per_cpu_gb"],
        sbatch_args=dict(settings["sbatch_args"]),
        job_name=f"mcaflow-{blake3(str(work.resolve()).encode()).hexdigest(length=8)}",
        # The worker's interpreter is this one, on a file system that the nodes share.
        env_command=f'export PATH="{Path(sys.executable).parent}:$PATH"',
    )


def tokenize(job: DatasetSpec, work: Path, tasks: int) -> None:
    """Run all tasks that are not done yet to their end.

    Raises:
        UserError: what a local task found wrong with the data.
        ConfigError: sbatch refuses the job.
        DataError: tasks on a cluster did not finish.
    """
    for folder in (TOKENS, LOG):
        (work / folder).mkdir(exist_ok=True)
    text_encoder(job.tokenizer_dir)
    steps = [ReadRows(str(work)), WriteTokens(str(work), job.tokenizer_dir, job.vocab_size, job.seed)]
    executor = build_executor(job.executor, job.num_workers, steps, tasks, work)
    # Forked tokenizers must not have threads of their own.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    local = isinstance(executor, LocalPipelineExecutor)
    try:
        with _default_sigterm() if local else nullcontext():
            executor.run()
    except subprocess.CalledProcessError as error:
        what = f"{error.cmd[0]} ended with status {error.returncode}"
        raise ConfigError(f"dataset.executor: {what}: the log of this stage says why; see {work / LOG}") from None
    if missing := executor.get_incomplete_ranks(skip_completed=True):
        raise DataError(
            f"{len(missing)} of {tasks} tokenizing tasks did not finish, first {missing[0]}; see {work / LOG}, "
            "then run again"
        )


@contextmanager
def _default_sigterm() -> Iterator[None]:
    """SIGTERM ends this process at once, and so the workers that are forked in the block.

    A pool ends its workers by it. A handler that raises, as a job has one, can strike them in a finalizer, where Python
    drops the exception; the pool then waits for ever.
    """
    former = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
