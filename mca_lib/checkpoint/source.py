"""A checkpoint that a run starts from (`load_checkpoint`): where it is, what it holds, and whether the run can take it.

    checkpoint-N/                       of our trainer: state/ is torch_dist, trainer.json says step and settings
    DIR/latest_checkpointed_iteration.txt, DIR/iter_0000005/     of Megatron-LM, or the inner directory itself

Tables of contents are read, and no tensor: what cannot be loaded is refused before a model is built. Nothing is ever
written to a source.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mca_lib.checkpoint.digest import json_digest
from mca_lib.checkpoint.reader import CheckpointReader
from mca_lib.checkpoint.retention import PREFIX, STATE_FOLDER, STATE_NAME, numbered
from mca_lib.checkpoint.sealed import file_digest, find_damage, read_record
from mca_lib.errors import CheckpointError
from mca_lib.models.hybrid.names import HYBRID_NORM

TRACKER = "latest_checkpointed_iteration.txt"
_EMBEDDING, _HYBRID_NORM = "embedding.word_embeddings.weight", f"{HYBRID_NORM}weight"


@dataclass(frozen=True)
class Source:
    """A torch_dist checkpoint with what is beside it."""

    path: Path
    """What errors name: `checkpoint-N/` or Megatron-LM's `iter_…/`."""
    tensors: Path
    """The torch_dist directory."""
    step: int
    run: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run that wrote it, as our trainer names them; of Megatron-LM the few that are the same."""
    layout: Mapping[str, int] = field(default_factory=dict)
    totals: Mapping[str, Any] = field(default_factory=dict)
    is_ours: bool = False

    @cached_property
    def reader(self) -> CheckpointReader:
        """Its table of contents. Raises CheckpointError where it is not whole."""
        return CheckpointReader(self.tensors)

    @property
    def is_hybrid(self) -> bool:
        return _HYBRID_NORM in self.reader.stored

    @property
    def num_layers(self) -> int:
        """Of a transformer; 0 where its layers are not stored as one tensor, as layers of several kinds are not."""
        return max(
            (m.size[0] for k, m in self.reader.stored.items() if k.startswith("decoder.layers.self_")), default=0
        )

    @property
    def vocabulary(self) -> tuple[int, int]:
        """(rows of the embedding with padding, hidden size)."""
        rows, hidden = self.reader.stored[_EMBEDDING].size
        return rows, hidden

    @property
    def has_experts(self) -> bool:
        return any(".mlp.router." in key for key in self.reader.stored)

    @property
    def optimizer(self) -> str | None:
        """`model` where each weight has its states under its name, `bucket` where they lie in flat buffers of one
        layout, `whole` where the optimizer was not distributed; None: there is none."""
        keys = self.reader.keys
        if any(".dp_group_idx_" in key for key in keys):
            return "bucket"
        if any(key.startswith("optimizer.state.param.") for key in keys):
            return "model"
        return "whole" if any(key.startswith("optimizer.") for key in keys) else None

    @property
    def digest(self) -> str:
        """Of the bytes of its files, for the identity of the run that starts from it. Ours are in its record."""
        if self.is_ours:
            return json_digest(read_record(self.path)["files"])
        files = sorted(p for p in self.tensors.iterdir() if p.is_file())
        return json_digest([[p.name, file_digest(p)] for p in files])


def open_source(path: str | Path) -> Source:
    """Find the checkpoint that `load_checkpoint` means.

    Raises CheckpointError where there is none, or only half of one.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"load_checkpoint={str(path)!r} is not a directory")
    if (path / STATE_NAME).is_file():
        return _of_trainer(path)
    if (path / TRACKER).is_file():
        path = _named_by_tracker(path)
    if (path / "metadata.json").is_file():
        return _of_megatron(path)
    if kept := numbered(path, PREFIX):
        newest = list(kept.values())[-1]
        raise CheckpointError(f"load_checkpoint={str(path)!r} holds several: name one, as {str(newest)!r}")
    raise CheckpointError(
        f"load_checkpoint={str(path)!r} is no checkpoint of a training: it has neither {STATE_NAME} nor {TRACKER} "
        "nor metadata.json; weights alone go to model_name_or_path"
    )


def _of_trainer(path: Path) -> Source:
    if damage := find_damage(path):
        raise CheckpointError(f"load_checkpoint={str(path)!r} is damaged: {damage}")
    state = json.loads((path / STATE_NAME).read_text())
    if "lora r" in state["run"]:
        raise CheckpointError(
            f"load_checkpoint={str(path)!r} holds adapters alone: merge them into the model (stage export), and start "
            "from that"
        )
    return Source(path, path / STATE_FOLDER, state["step"], state["run"], state["layout"], state["totals"], True)


def _named_by_tracker(path: Path) -> Path:
    """Megatron-LM's tracker holds the iteration, or `release` for weights without a training."""
    text = (path / TRACKER).read_text().strip()
    if text != "release" and not (text.isascii() and text.isdigit()):
        raise CheckpointError(f"{path / TRACKER} holds {text!r:.40}, expected an iteration or release")
    inner = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not inner.is_dir():
        raise CheckpointError(f"{path / TRACKER} names {inner.name}, and {inner} is missing")
    return inner


def _of_megatron(path: Path) -> Source:
    backend = json.loads((path / "metadata.json").read_text()).get("sharded_backend")
    if backend != "torch_dist":
        raise CheckpointError(f"{path}: has format {backend!r}; save it again as torch_dist (--ckpt-format torch_dist)")
    # Megatron is imported here: it knows which types may be in what Megatron-LM has saved.
    from megatron.core.dist_checkpointing import load_common_state_dict

    CheckpointReader(path)
    common = load_common_state_dict(str(path))
    args = common.get("args")
    layout = {"expert": getattr(args, "expert_model_parallel_size", 1)}
    return Source(path, path, int(common.get("iteration") or 0), dict(_megatron_run(args)), layout)


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
