"""A checkpoint that a run starts from (`load_checkpoint`): where it is, what it holds, and whether the run can take it.

    checkpoint-N/                       of our trainer: state/ is torch_dist, trainer.json says step and settings
    DIR/latest_checkpointed_iteration.txt, DIR/iter_0000005/     of Megatron-LM, or the inner directory itself:
                                        torch_dist, or fsdp_dtensor (Megatron-FSDP)

Tables of contents are read, and no tensor: what cannot be loaded is refused before a model is built. Nothing is ever
written to a source.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mca_lib.checkpoint.digest import json_digest
from mca_lib.checkpoint.fsdp_dtensor import FsdpCheckpoint, is_fsdp_dtensor
from mca_lib.checkpoint.reader import CheckpointReader
from mca_lib.checkpoint.retention import PREFIX, STATE_FOLDER, STATE_NAME, numbered
from mca_lib.checkpoint.sealed import file_digest, find_damage, read_record
from mca_lib.errors import CheckpointError
from mca_lib.models.hybrid.names import HYBRID_NORM

TRACKER = "latest_checkpointed_iteration.txt"


class TorchDist(CheckpointReader):
    """What a torch_dist checkpoint of a training holds, by its table of contents."""

    @property
    def is_hybrid(self) -> bool:
        return f"{HYBRID_NORM}weight" in self.stored

    @property
    def num_layers(self) -> int:
        """Of a transformer; 0 where its layers are not stored as one tensor, as layers of several kinds are not."""
        return max((m.size[0] for key, m in self.stored.items() if key.startswith("decoder.layers.self_")), default=0)

    @property
    def vocabulary(self) -> tuple[int, int]:
        """(rows of the embedding with padding, hidden size)."""
        rows, hidden = self.stored["embedding.word_embeddings.weight"].size
        return rows, hidden

    @property
    def has_experts(self) -> bool:
        return any(".mlp.router." in key for key in self.stored)

    @property
    def has_optimizer(self) -> bool:
        return any(".dp_group_idx_" in key or key.startswith("optimizer.") for key in self.keys)

    @property
    def has_bucket_states(self) -> bool:
        """Its optimizer's states lie in flat buffers of one layout, and not under the names of weights."""
        return any(".dp_group_idx_" in key for key in self.keys)

    @property
    def has_distributed_states(self) -> bool:
        """Its optimizer's states are the distributed optimizer's, which has a master of every weight."""
        return any(key.startswith("optimizer.state.param.") for key in self.keys)


@dataclass(frozen=True)
class Source:
    """A checkpoint with what is beside it."""

    path: Path
    """What errors name: `checkpoint-N/`, or the directory of an iteration of Megatron-LM."""
    contents: TorchDist | FsdpCheckpoint
    step: int
    run: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run that wrote it, as our trainer names them; of Megatron-LM the few that are the same."""
    layout: Mapping[str, int] = field(default_factory=dict)
    totals: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> Path:
        """The directory of the tensors."""
        return self.contents.directory

    @property
    def digest(self) -> str:
        """Of the bytes of its files, for the identity of the run that starts from it. Ours are in its record."""
        if (record := read_record(self.path)) is not None:
            return json_digest(record["files"])
        files = sorted(p for p in self.tensors.iterdir() if p.is_file())
        return json_digest([[p.name, file_digest(p)] for p in files])


def open_source(path: str | Path) -> Source:
    """Find the checkpoint that `load_checkpoint` means.

    Raises CheckpointError where there is none, or only half of one.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(
            f"load_checkpoint={str(path)!r} is not a directory: name checkpoint-N/, or one of Megatron-LM"
        )
    if (path / STATE_NAME).is_file():
        return _of_trainer(path)
    if (path / TRACKER).is_file():
        path = _named_by_tracker(path)
    if is_fsdp_dtensor(path):
        contents = FsdpCheckpoint(path)
        return Source(path, contents, contents.step)
    if (path / "metadata.json").is_file():
        return _of_torch_dist(path)
    if kept := numbered(path, PREFIX):
        newest = list(kept.values())[-1]
        raise CheckpointError(f"load_checkpoint={str(path)!r} holds several: name one, as {str(newest)!r}")
    raise CheckpointError(
        f"load_checkpoint={str(path)!r} is no checkpoint of a training: it has neither {STATE_NAME} nor {TRACKER} "
        "nor metadata.json; weights alone go to model_name_or_path"
    )


def _of_trainer(path: Path) -> Source:
    if damage := find_damage(path):
        raise CheckpointError(f"load_checkpoint={str(path)!r} is damaged: {damage}; use the one before it")
    state = json.loads((path / STATE_NAME).read_text())
    if "lora r" in state["run"]:
        raise CheckpointError(
            f"load_checkpoint={str(path)!r} holds adapters alone: merge them into the model (stage export), and start "
            "from that"
        )
    contents = TorchDist(path / STATE_FOLDER)
    return Source(path, contents, state["step"], state["run"], state["layout"], state["totals"])


def _named_by_tracker(path: Path) -> Path:
    """Megatron-LM's tracker holds the iteration, or `release` for weights without a training."""
    text = (path / TRACKER).read_text().strip()
    if text != "release" and not (text.isascii() and text.isdigit()):
        raise CheckpointError(f"{path / TRACKER} holds {text!r:.40}, expected an iteration or release")
    inner = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not inner.is_dir():
        raise CheckpointError(f"{path / TRACKER} names {inner.name}, and {inner} is missing")
    return inner


def _of_torch_dist(path: Path) -> Source:
    backend = json.loads((path / "metadata.json").read_text()).get("sharded_backend")
    if backend != "torch_dist":
        raise CheckpointError(f"{path}: has format {backend!r}; save it again with --ckpt-format torch_dist")
    # Megatron is imported here: it knows which types may be in what Megatron-LM has saved.
    from megatron.core.dist_checkpointing import load_common_state_dict

    contents = TorchDist(path)
    common = load_common_state_dict(str(path))
    args = common.get("args")
    return Source(path, contents, int(common.get("iteration") or 0), dict(_megatron_run(args)))


def _megatron_run(args: Any) -> Iterator[tuple[str, Any]]:
    """Settings of Megatron-LM that mean what ours of the same kind do."""
    names = {
        "hidden_size": "hidden_size",
        "ffn_hidden_size": "ffn_hidden_size",
        "num_attention_heads": "num_attention_heads",
        "train_iters": "total_steps",
        "global_batch_size": "global_batch_size",
        "lr": "learning_rate",
    }
    for name, ours in names.items():
        if getattr(args, name, None) is not None:
            yield ours, getattr(args, name)
