"""What the tests of starting from another training's checkpoint share with their acceptance script."""

import re
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.mca_lib.trainers.training import HYPERPARAMETERS, history, make_model, make_store, stored_tensors

MAMBA = {"mamba_head_dim": 16, "mamba_num_groups": 2, "mamba_state_size": 8, "mamba_chunk_size": 16}
STEPS, SAVED = 5, 3
"""Steps of the transformer's training, and the one whose checkpoint is started from."""
OPTIONS = {"max_steps": STEPS, "save_steps": SAVED}
DENSE, EXPERTS = "*-*-*-*-", "*E*E*E*E"
FRESH = "M*-*-M*-*-"


@dataclass(frozen=True)
class Training:
    """A training of a transformer, and what `train` returned of it."""

    folder: Path
    values: list[dict[str, Any]]

    @property
    def checkpoint(self) -> Path:
        """The one that is started from."""
        return self.folder / f"checkpoint-{SAVED}"

    @property
    def steps(self) -> np.ndarray:
        """[steps, 2] loss and gradient norm after the checkpoint."""
        return history(self.values)[SAVED:]


def make_models(directory: Path) -> None:
    """Transformers of four layers: dense with a vocabulary that tensor parallelism pads, and with experts."""
    from tests.mca_lib.tiny_models import save_hf

    make_model(directory / "dense", tied=True, vocab_size=131)
    save_hf(directory / "experts", "mixtral", "float32")
    make_store(directory / "store", rows=18)


def engine_of(model: str, out: str, options: dict[str, Any]) -> Any:
    """An engine with the model that the options ask for, as the trainer makes it."""
    from mca_lib.models import AutoModel
    from mca_lib.parallel import initialize_model_parallel
    from mca_lib.trainers import Seq2SeqTrainingArguments
    from mca_lib.trainers.engine import Engine
    from mca_lib.trainers.loss import TokenObjective

    args = Seq2SeqTrainingArguments(output_dir=out, **{**HYPERPARAMETERS, **options})
    initialize_model_parallel(args, args.seed)
    return Engine(list(AutoModel.from_pretrained(model, args)), args, STEPS, TokenObjective())


def load_and_save(model: str, out: str, options: dict[str, Any]) -> dict[str, Any]:
    """Start from `load_checkpoint` and save at once what is there then. Returns where the run is."""
    from mca_lib.checkpoint.gpt_source import start_from
    from mca_lib.checkpoint.retention import Retention
    from mca_lib.checkpoint.saver import CheckpointSaver
    from mca_lib.checkpoint.source import open_source
    from mca_lib.checkpoint.training import TrainerState, layout
    from mca_lib.trainers.optimizer import optimizer_parts

    engine = engine_of(model, out, options)
    config = engine.bare_chunks[0].mca_config
    step = start_from(open_source(options["load_checkpoint"]), engine, config.layer_map if config.hybrid else None)
    groups = [g for part in optimizer_parts(engine.optimizer) if part.optimizer for g in part.optimizer.param_groups]
    saver = CheckpointSaver(Path(out), engine, Retention())
    saver.begin(TrainerState(SAVED, {}, {}, layout(engine)), going_on=False)
    saver.finish()
    return {
        "step": step,
        "adam": {group.get("step") for group in groups if group["params"]},
        "rate": engine.learning_rate,
        "skipped": engine.skipped_steps,
    }


def save_as_megatron_lm(model: str, out: str, options: dict[str, Any], sharding: str = "fully_reshardable") -> None:
    """Start from our checkpoint and write what Megatron-LM's `save_checkpoint` does of it, with its tracker."""
    from megatron.core import dist_checkpointing, parallel_state

    from mca_lib.checkpoint.gpt_source import start_from
    from mca_lib.checkpoint.source import open_source

    engine = engine_of(model, out, options)
    start_from(open_source(options["load_checkpoint"]), engine, None)
    metadata = {
        "distrib_optim_sharding_type": sharding,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    grouped = {**metadata, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {"model": engine.bare_chunks[0].sharded_state_dict(metadata=grouped)}
    config = engine.bare_chunks[0].mca_config
    state |= {
        "args": Namespace(num_layers=config.num_layers, hidden_size=config.hidden_size, global_batch_size=4),
        "checkpoint_version": 3.0,
        "iteration": SAVED,
        "optimizer": engine.optimizer.sharded_state_dict(state, is_loading=False, metadata=grouped),
        "opt_param_scheduler": engine.scheduler.state_dict(),
        "num_floating_point_operations_so_far": 0,
    }
    folder = Path(out) / f"iter_{SAVED:07d}"
    folder.mkdir(parents=True)
    dist_checkpointing.save(state, str(folder), content_metadata=metadata)
    (Path(out) / "latest_checkpointed_iteration.txt").write_text(str(SAVED))


@dataclass(frozen=True)
class Differences:
    """Of a hybrid's training checkpoint and the transformer's that it started from."""

    compared: int
    differing: list[str]
    """Keys that are not the same bits, and the transformer's that have no counterpart."""
    fresh: dict[str, Any]
    """The hybrid's other tensors."""


def differences(hybrid: Path, transformer: Path, pattern: str) -> Differences:
    """Compare tensor by tensor: weights, fp32 masters and moments."""
    import torch

    from mca_lib.models.hybrid.names import transformer_name
    from mca_lib.models.hybrid.pattern import LayerMap

    found, expected = (stored_tensors(folder / "state") for folder in (hybrid, transformer))
    layers, differing, fresh, compared = LayerMap(pattern), [], {}, set()
    for key, value in found.items():
        states, name = re.fullmatch(r"(optimizer\.state\.\w+\.)?(.*)", key).groups(default="")
        source = transformer_name(name, layers)
        if source is None:
            fresh[key] = value
            continue
        index, source = re.fullmatch(r"(?:decoder\.layers\.(\d+)\.)?(.*)", source).groups()
        stored = f"{states}{'decoder.layers.' if index else ''}{source}"
        other = expected[stored][int(index)] if index else expected[stored]
        rows = min(len(value), len(other))  # the padding of the vocabulary is the layout's
        compared.add(stored)
        if not torch.equal(value[:rows], other[:rows]):
            differing.append(key)
    return Differences(len(found) - len(fresh), differing + sorted(expected.keys() - compared), fresh)


def whole(tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Name → tensor of the keys with a prefix; what a checkpoint keeps of a Mamba layer in parts is put together."""
    import torch

    order, parts = ("z", "x", "B", "C", "dt"), {}
    named = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    for name, value in sorted(
        named.items(), key=lambda pair: order.index(last) if (last := pair[0].rpartition(".")[2]) in order else 0
    ):
        parts.setdefault(re.sub(rf"\.({'|'.join(order)})$", "", name), []).append(value)
    return {name: torch.cat(found) for name, found in parts.items()}
