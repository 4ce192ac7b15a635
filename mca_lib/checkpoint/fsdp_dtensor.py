"""Checkpoints of Megatron-FSDP (Megatron-LM's `--ckpt-format fsdp_dtensor`), by the names of our weight tables.

    model.module.decoder.layers.0.mlp.linear_fc1.weight_w              a weight, fp32; _w and _v are the halves of a
                                                                       gated MLP
    optimizer.state.module.….decoder.layers.0.….weight_w.exp_avg       its moments, exp_avg and exp_avg_sq
    optimizer.param_to_group_meta.module.….weight.step, .lr, …         what its parameter group says, an object each
    iteration, args, opt_param_scheduler.…, rng_state.…                the run

Names are those of the modules that were trained, under as many `module.` as there were wrappers; a number follows
`optimizer` where there are several. Every tensor is stored whole, in pieces: whichever rank needs it reads it, at any
layout, without Megatron-FSDP. No Megatron here.
"""

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch

from mca_lib.checkpoint.pieces import StoredPieces
from mca_lib.converter.plan import entries
from mca_lib.errors import CheckpointError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.hybrid.names import HYBRID_NORM
from mca_lib.models.naming import LAYER, expert_in_layer, expert_name, fused_names

WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")

_KEY = re.compile(
    r"^(?:model|optimizer\.(?:\d+\.)?state)\.(?:module\.)*(?P<name>.+?)(?P<half>_[wv])?(?:\.(?P<moment>exp_avg|exp_avg_sq))?$"
)
_STEP = re.compile(r"^optimizer\.(?:\d+\.)?(?:param_to_group_meta|state)\..*\.step$")
_MTP_LAYER = ".mtp_model_layer."
_PADDING = 1024
"""Megatron-LM rounds the vocabulary up to a multiple of 128 x tensor parallel size."""
_LISTED = 4

type Keys = tuple[str, ...]
"""Of a tensor: one, or its two halves along the first axis."""


def is_fsdp_dtensor(directory: str | Path) -> bool:
    """Does the directory look like one? Unlike Megatron's `torch_dist` it has no `metadata.json`."""
    directory = Path(directory)
    return (directory / ".metadata").is_file() and not (directory / "metadata.json").is_file()


class FsdpCheckpoint(StoredPieces):
    """What a checkpoint holds. Raises CheckpointError, in one line, for a directory that is none, or half of one."""

    def __init__(self, directory: str | Path) -> None:
        if not (Path(directory) / ".metadata").is_file():
            raise CheckpointError(
                f"{directory}: not a whole fsdp_dtensor checkpoint: .metadata is missing; name the directory of one "
                "iteration, as iter_0000100"
            )
        super().__init__(directory)
        if not self.tensors[WEIGHT]:
            raise CheckpointError(
                f"{directory}: not an fsdp_dtensor checkpoint: no tensor of it is named model.module.…"
            )

    @cached_property
    def tensors(self) -> dict[str, dict[str, Keys]]:
        """Kind (`weight`, `exp_avg`, `exp_avg_sq`) → name of the trained module's parameter → keys."""
        found: dict[str, dict[str, dict[str, str]]] = {kind: {} for kind in (WEIGHT, *MOMENTS)}
        for key in self.stored:
            match = _KEY.match(key)
            if match is None or "_extra_state" in key or key.startswith("model.") != (match["moment"] is None):
                continue
            halves = found[match["moment"] or WEIGHT].setdefault(match["name"], {})
            halves[match["half"] or ""] = key
        return {kind: {name: self._in_order(name, h) for name, h in of.items()} for kind, of in found.items()}

    @property
    def is_hybrid(self) -> bool:
        return any(name.startswith(HYBRID_NORM) for name in self.tensors[WEIGHT])

    @property
    def num_layers(self) -> int:
        """Layers of the decoder."""
        return max((int(m[1]) + 1 for name in self.tensors[WEIGHT] if (m := LAYER.match(name))), default=0)

    @property
    def vocabulary(self) -> tuple[int, int]:
        """(rows of the embedding with padding, hidden size)."""
        if VOCABULARY[0] not in self.tensors[WEIGHT]:
            raise CheckpointError(f"{self.directory}: {VOCABULARY[0]} is missing")
        rows, hidden = self.shape(self.tensors[WEIGHT][VOCABULARY[0]])
        return rows, hidden

    @property
    def has_experts(self) -> bool:
        return any(".mlp.router." in name for name in self.tensors[WEIGHT])

    @property
    def has_optimizer(self) -> bool:
        """Are there moments?"""
        return all(self.tensors[moment] for moment in MOMENTS)

    @cached_property
    def step(self) -> int:
        """Steps that the run had made. Raises CheckpointError where the checkpoint does not say."""
        return self._number("iteration") if "iteration" in self.objects else self.adam_step

    @cached_property
    def adam_step(self) -> int:
        """Updates that the moments are of, which corrects their bias; below `step` where fp16 skipped some."""
        for key in (*self.objects, *self.stored):
            if _STEP.match(key):
                return self._number(key)
        raise CheckpointError(f"{self.directory}: says nowhere how many steps its optimizer has made")

    def named(self, kind: str, config: McaModelConfig) -> dict[str, Keys]:
        """Name in our checkpoints → keys.

        Args:
            kind: `weight`, `exp_avg` or `exp_avg_sq`.
            config: of the transformer.
        """
        return {checkpoint_name(name, config): keys for name, keys in self.tensors[kind].items()}

    def shape(self, keys: Keys) -> tuple[int, ...]:
        """Of the tensor that these make up."""
        first, *rest = self.stored[keys[0]].size
        return (first * len(keys), *rest)

    def read_rows(self, keys: Keys, offsets: tuple[int, ...], destination: torch.Tensor) -> None:
        """The elements from `offsets` on, into a contiguous CPU tensor of any dtype and as many axes.

        Read are the bytes of these elements alone, whatever pieces hold them.
        """
        dtype = self.stored[keys[0]].properties.dtype
        value = destination if destination.dtype == dtype else torch.empty(destination.shape, dtype=dtype)
        length = self.stored[keys[0]].size[0]
        first, last = offsets[0], offsets[0] + destination.shape[0]
        for half, key in enumerate(keys):
            low, high = max(first, half * length), min(last, (half + 1) * length)
            if low < high:
                self.read_box(key, (low - half * length, *offsets[1:]), value[low - first : high - first])
        if value is not destination:
            destination.copy_(value)

    def check(self, config: McaModelConfig, *, optimizer: bool) -> None:
        """Is it of this transformer, and whole? Names and shapes are compared, and no weights are read.

        Raises:
            CheckpointError: lists what is missing, unexpected or of another shape.
        """
        if self.is_hybrid:
            raise CheckpointError(f"{self.directory}: is of a hybrid, and a run starts from a transformer's checkpoint")
        if config.linear_attention_layers:
            raise CheckpointError(f"{self.directory}: a model with gated delta nets is not read from fsdp_dtensor")
        if optimizer and not self.has_optimizer:
            raise CheckpointError(f"{self.directory}: holds no optimizer state; set no_load_optim to take its weights")
        expected = {entry.mca: entry.mapping.local_shape(config, 0, 1) for entry in entries(config)}
        for kind in (WEIGHT, *MOMENTS) if optimizer else (WEIGHT,):
            self._compare(kind, self.named(kind, config), expected)

    def _compare(self, kind: str, found: Mapping[str, Keys], expected: Mapping[str, tuple[int, ...]]) -> None:
        trained = {
            name: shape for name, shape in expected.items() if kind == WEIGHT or not name.endswith("expert_bias")
        }
        problems = [f"{name} is missing" for name in trained if name not in found]
        problems += [f"{name} is not part of the model" for name in found if name not in trained]
        problems += [
            f"{name} has shape {list(self.shape(keys))}, expected {list(trained[name])}"
            for name, keys in found.items()
            if name in trained and not _fits(name, self.shape(keys), trained[name])
        ]
        if problems:
            listed = "; ".join(problems[:_LISTED])
            raise CheckpointError(f"{self.directory}: of another model, {kind}: {listed} ({len(problems)} in all)")

    def _in_order(self, name: str, halves: Mapping[str, str]) -> Keys:
        if set(halves) == {"_w", "_v"}:
            return halves["_w"], halves["_v"]
        if len(halves) == 1 and "" in halves:
            return (halves[""],)
        raise CheckpointError(f"{self.directory}: {name} is stored in part: {', '.join(halves.values())} alone")

    def _number(self, key: str) -> int:
        if key in self.stored:
            value = torch.empty(self.stored[key].size, dtype=self.stored[key].properties.dtype)
            self.read_box(key, (0,) * value.ndim, value)
        else:
            value = self.read_object(key)
        try:
            return int(value)
        except (TypeError, ValueError) as e:
            raise CheckpointError(f"{self.directory}: {key} is {value!r:.40}, expected a number") from e


def checkpoint_name(name: str, config: McaModelConfig) -> str:
    """Name in our checkpoints of a parameter of Megatron's GPTModel, in its local or Transformer Engine's layers."""
    if match := LAYER.match(name):
        number, rest = int(match[1]), name[match.end() :]
        return f"decoder.layers.{number}.{_layer_name(rest, config, number in config.moe_layers)}"
    if _MTP_LAYER in name:
        layer, _, rest = name.partition(_MTP_LAYER)
        return f"{layer}.transformer_layer.{_layer_name(rest, config, config.num_layers - 1 in config.moe_layers)}"
    return name


def _layer_name(name: str, config: McaModelConfig, has_experts: bool) -> str:
    if found := expert_in_layer(name):
        return expert_name(*found)
    for own, fused in fused_names(config, has_experts):
        if name.startswith(own):
            return fused + name.removeprefix(own)
    return name


def _fits(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """The same shape, but for the rows that pad a vocabulary."""
    padding = found[0] - expected[0] if name in VOCABULARY and found else 0
    return found[1:] == expected[1:] and (0 <= padding < _PADDING if name in VOCABULARY else found == expected)
