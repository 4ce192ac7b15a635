"""What the tests of indexed data sets run in a rank, where Megatron is imported already."""

import os
import signal
from pathlib import Path
from typing import Any

from mca_lib.data import shards, tokenization
from mca_lib.data.prepare import dataset


def build_in_parts(spec: dict[str, Any], shard_bytes: int) -> dict[str, Any]:
    """Result of the `dataset` job, with text cut into parts of `shard_bytes`; or what the user is told."""
    shards.SHARD_BYTES = shard_bytes
    # Workers that took this over would never end.
    signal.signal(signal.SIGTERM, lambda *_: None)
    return dataset(spec, lambda *_, **__: None)


def kill_and_resume(
    spec: dict[str, Any], shard_bytes: int, task: int
) -> tuple[int, list[str], list[str], dict[str, Any]]:
    """A run that dies amid `task`, and a second one: (signal, tasks done by the first, those done again, result)."""
    child = os.fork()
    if child == 0:
        os.setsid()  # datatrove has a process of its own, which is to die too
        write = tokenization.MegatronTokenizedFile.write

        def dying_write(file: Any, tokens: Any) -> None:
            write(file, tokens)
            if file.filename.startswith(f"{task:05d}"):
                os.killpg(0, signal.SIGKILL)

        tokenization.MegatronTokenizedFile.write = dying_write
        build_in_parts(spec, shard_bytes)
    _, status = os.waitpid(child, 0)
    done = sorted(path.name for path in Path(spec["work"], "log", "completions").iterdir())
    files = {rank: Path(spec["work"], "tokens", f"{rank}_tokens.bin") for rank in done}
    before = {rank: file.stat().st_mtime_ns for rank, file in files.items()}
    result = build_in_parts(spec, shard_bytes)
    again = [rank for rank, file in files.items() if file.stat().st_mtime_ns != before[rank]]
    return os.WTERMSIG(status), done, again, result


def read_by_megatron(split: Path, sequence_length: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """(tokens, labels) of each sample of the first corpus by Megatron's `GPTDataset`, not shuffled."""
    import numpy as np
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    class Tokenizer:
        eod, vocab_size, unique_identifiers = 0, None, None

    prefix = str(split / "corpus-0")
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        blend_per_split=[([prefix], None), None, None],
        path_to_cache=str(split.parent / "megatron"),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=Tokenizer(),
    )
    corpus = GPTDataset.build_low_level_dataset(prefix, config)
    data = GPTDataset(corpus, prefix, np.arange(len(corpus), dtype=np.int32), None, Split.train, config)
    data.shuffle_index = np.arange(len(data))
    return [
        (sample["tokens"].tolist(), sample["labels"].tolist()) for sample in map(data.__getitem__, range(len(data)))
    ]
