"""Where a training begins: at the newest checkpoint of its folder, else at another training's, else at step 0."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mca_lib.checkpoint.collective import from_rank_0
from mca_lib.checkpoint.gpt_source import start_from
from mca_lib.checkpoint.source import Source, open_source
from mca_lib.checkpoint.source_checks import check_run, check_source
from mca_lib.checkpoint.training import find_checkpoint, load_checkpoint
from mca_lib.models.config import McaModelConfig
from mca_lib.trainers.best import BestModel
from mca_lib.trainers.engine import Engine
from mca_lib.trainers.progress import Totals
from mca_lib.trainers.training_args import TrainingArguments

log = logging.getLogger(__name__)


def resume(
    output_dir: Path, engine: Engine, config: McaModelConfig, run: Mapping[str, Any], best: BestModel | None
) -> tuple[int, Totals]:
    """Load what the run goes on from. Returns the steps that are done, and their counters; collective.

    Args:
        config: of the model that is trained.
        run: the identity of the run.
        best: learns which evaluation was the best until then. That of another training is not gone on with.

    Raises:
        CheckpointError, ConfigError: the checkpoint is of another run, or cannot be started from.
    """
    args = engine.args
    found = find_checkpoint(output_dir, dict(run))
    if found is not None:
        state = load_checkpoint(found, engine, args.seed)
        if best is not None:
            best.found = state.best
        log.info("resuming from %s", found)
        return state.step, Totals(**state.totals)
    if args.load_checkpoint is None:
        return 0, Totals()
    source = _checked_source(engine, config, run)
    translated = config.hybrid is not None and not source.contents.is_hybrid
    step = start_from(source, engine, config.layer_map if translated else None)
    fresh = f"; layers {_listed(config.layer_map.fresh)} are fresh" if translated and config.mamba_layers else ""
    log.info("starting at step %d from %s%s", step, source.path, fresh)
    return step, Totals(**source.totals) if step else Totals()


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def source_identity(args: TrainingArguments) -> dict[str, Any]:
    """What the run starts from, and what it takes of it, for the identity of the run; collective."""
    if args.load_checkpoint is None:
        return {}
    digest = from_rank_0(lambda: open_source(args.load_checkpoint).digest)
    return {"load_checkpoint": {"digest": digest, "finetune": args.finetune, "no_load_optim": args.no_load_optim}}


def _checked_source(engine: Engine, config: McaModelConfig, run: Mapping[str, Any]) -> Source:
    source = open_source(engine.args.load_checkpoint)
    check_source(source, config, engine.args)
    check_run(source, run, finetune=engine.args.finetune)
    return source
