"""What outlives a training beside its artifact, in `<store>/.runs/train-KEY/`:

    training_log.jsonl, logs/*.log    figures of every logged step, and the output of the ranks
    checkpoint-N/                     those of multiples of `save_keep_every`, with the optimizer's state
    …                                 events of TensorBoard, where it is reported to

Nothing here is part of a key or of an artifact, and nothing reads it again: remove what is no longer of use.
"""

import shutil
from pathlib import Path

from mca_lib.checkpoint.retention import PREFIX, numbered
from mca_lib.trainers.names import LOG_NAME
from tasks.contract import StageContext
from tasks.links import link


def runs_folder(ctx: StageContext) -> Path:
    """Where that of this key is kept."""
    return ctx.store.root / ".runs" / ctx.work.name


def keep_run(ctx: StageContext, every: int) -> None:
    """Keep the logs, and checkpoints of multiples of `every` steps, before the work folder goes."""
    target = runs_folder(ctx)
    for log in (ctx.work / LOG_NAME, *ctx.logs.glob("*.log")):
        kept = target / log.relative_to(ctx.work)
        kept.unlink(missing_ok=True)
        if log.is_file():
            link(log, kept)
    for step, checkpoint in numbered(ctx.work, PREFIX).items():
        if every and step % every == 0:
            kept = target / checkpoint.name
            shutil.rmtree(kept, ignore_errors=True)
            checkpoint.rename(kept)
