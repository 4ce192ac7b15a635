"""A training starts from a checkpoint of Megatron-FSDP: weights, fp32 masters and moments, at any layout.

Megatron's own description of a model chunk (`sharded_state_dict`) says which box of the whole tensor each of the rank's
parameters is. A rank reads that box, one parameter at a time, and of masters and moments only the rows of which the
distributed optimizer has given it a share. A hybrid takes what a transformer has; its other layers keep their
initialization, masters included, with moments of zero.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer

from mca_lib.checkpoint.collective import raise_everywhere
from mca_lib.checkpoint.fsdp_dtensor import MOMENTS, VOCABULARY, WEIGHT, FsdpCheckpoint, Keys
from mca_lib.converter.casts import cast, is_finite
from mca_lib.errors import CheckpointError, ConfigError, UserError
from mca_lib.models.hybrid.names import transformer_name
from mca_lib.models.naming import checkpoint_parameters
from mca_lib.trainers.engine import Engine
from mca_lib.trainers.optimizer import allocate_moments, optimizer_parts

if TYPE_CHECKING:
    from mca_lib.models.language_model import McaLanguageModel


@dataclass(frozen=True)
class Box:
    """Consecutive rows of a rank's parameter, and where they are in the whole tensor."""

    first_row: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def rows(self, start: int, stop: int) -> "Box | None":
        """The part within rows `start:stop` of the parameter; None when there is none."""
        low, high = max(start, self.first_row), min(stop, self.first_row + self.shape[0])
        if low >= high:
            return None
        begin, *rest = self.offsets
        return Box(low, (high - low, *self.shape[1:]), (begin + low - self.first_row, *rest))


@dataclass(frozen=True)
class Share:
    """What the optimizer of this rank has of a parameter: elements `start:stop` of it, in row-major order."""

    start: int
    stop: int
    states: dict[str, torch.Tensor]
    """`weight` (the fp32 master, or the parameter's own share), `exp_avg`, `exp_avg_sq`; of `stop - start` elements."""


def load_fsdp_dtensor(path: str | Path, target: "Engine | Sequence[McaLanguageModel]", *, optimizer: bool) -> int:
    """Fill model chunks, or the chunks of an engine with its masters, from a transformer's checkpoint; collective.

    Args:
        target: of a transformer, or of a hybrid that starts from it. Model chunks alone take weights only.
        optimizer: take the moments and Adam's step too, for an engine.

    Returns:
        Steps that the checkpoint's run had made.

    Raises, on every rank:
        CheckpointError: the checkpoint is not whole or is of another model; nothing has been changed then, but where a
            tensor's bytes are damaged.
        ConfigError: a weight is too large for its parameter's dtype, or the optimizer cannot take moments.
    """
    engine = target if isinstance(target, Engine) else None
    chunks: Sequence[McaLanguageModel] = engine.bare_chunks if engine else target
    step, error = 0, None
    try:
        source = FsdpCheckpoint(path)
        source.check(chunks[0].mca_config.transformer, optimizer=optimizer)
        step, adam_step = source.step, source.adam_step if optimizer else 0
        shares = _shares(engine, MOMENTS if optimizer else ()) if engine else {}
        _fill(source, chunks, shares, MOMENTS if engine and optimizer else ())
        if engine and optimizer:
            _set_adam_step(engine.optimizer, adam_step)
    except UserError as e:
        error = e
    raise_everywhere(error)
    return step


@torch.no_grad()
def _fill(
    source: FsdpCheckpoint, chunks: Sequence["McaLanguageModel"], shares: dict[int, Share], moments: Sequence[str]
) -> None:
    """Read what each parameter has in the checkpoint, and of `moments` what this rank's optimizer has of them."""
    config = chunks[0].mca_config
    named = {kind: source.named(kind, config.transformer) for kind in (WEIGHT, *moments)}
    for chunk in chunks:
        boxes = _boxes(chunk, config.vocab_size)
        for name, parameter in checkpoint_parameters(chunk):
            stored = transformer_name(name, config.layer_map) if config.hybrid is not None else name
            if stored is None:
                continue
            weight = _read(source, named[WEIGHT][stored], boxes[id(parameter)], parameter.shape)
            parameter.copy_(cast(f"{source.directory}: {stored}", weight, parameter.dtype))
            if (share := shares.get(id(parameter))) is None:
                continue
            share.states[WEIGHT].copy_(weight.flatten()[share.start : share.stop])
            for moment in moments:
                _fill_moment(source, named[moment][stored], boxes[id(parameter)], parameter.shape, share, moment)


def _fill_moment(
    source: FsdpCheckpoint, keys: Keys, boxes: Sequence[Box], shape: torch.Size, share: Share, moment: str
) -> None:
    """Rows of which the share has a part are read, and no others."""
    width = max(1, shape[1:].numel())
    first, last = share.start // width, -(-share.stop // width)
    value = _read(source, keys, boxes, shape, first, last).flatten()
    share.states[moment].copy_(value[share.start - first * width : share.stop - first * width])


def _read(
    source: FsdpCheckpoint, keys: Keys, boxes: Sequence[Box], shape: torch.Size, first: int = 0, last: int | None = None
) -> torch.Tensor:
    """Rows `first:last` of a rank's parameter of this shape, fp32 on CPU; zero where a vocabulary is padded."""
    last = shape[0] if last is None else last
    value = torch.zeros((last - first, *shape[1:]), dtype=torch.float32)
    for box in boxes:
        if (part := box.rows(first, last)) is not None:
            begin = part.first_row - first
            source.read_rows(keys, part.offsets, value[begin : begin + part.shape[0]])
    if not is_finite(value):
        raise CheckpointError(f"{source.directory}: {keys[0]} holds NaN or an infinite value")
    return value


def _boxes(chunk: "McaLanguageModel", vocab_size: int) -> dict[int, list[Box]]:
    """Identity of each of the chunk's tensors → the boxes that make it up; none for rows that pad the vocabulary.

    A gated MLP is two boxes. Tensors that Megatron describes otherwise than as a pile of rows are not in the result;
    a transformer has none.
    """
    found: dict[int, list[Box]] = {}
    for entry in nested_values(chunk.sharded_state_dict()):
        if isinstance(entry, ShardedTensor | ShardedTensorFactory):
            found[id(entry.data)] = list(_piled(entry, vocab_size))
    return found


def _piled(entry: ShardedTensor | ShardedTensorFactory, vocab_size: int) -> Iterator[Box]:
    first_row = 0
    for part in nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]:
        rows, *rest = part.local_shape
        offsets = tuple(part.global_offset[part.prepend_axis_num :])
        real = max(0, min(rows, vocab_size - offsets[0])) if part.key in VOCABULARY else rows
        if real:
            yield Box(first_row, (real, *rest), offsets)
        first_row += rows


def _shares(engine: Engine, moments: Sequence[str]) -> dict[int, Share]:
    """Identity of each trained parameter → what this rank's optimizer has of it. Allocates moments, where asked."""
    if moments and engine.args.optimizer_offload_fraction:
        raise ConfigError(
            f"optimizer_offload_fraction={engine.args.optimizer_offload_fraction}: moments of an fsdp_dtensor "
            "checkpoint are loaded into an optimizer that is not offloaded; use 0, or set no_load_optim"
        )
    if moments:
        allocate_moments(engine.optimizer)
    found: dict[int, Share] = {}
    for part in optimizer_parts(engine.optimizer):
        if part.optimizer is None:
            continue
        for parameter, main, start in _masters(part):
            states = {moment: part.optimizer.state[main][moment].view(-1) for moment in moments}
            states[WEIGHT] = main.detach().view(-1)
            found[id(parameter)] = Share(start, start + main.numel(), states)
    return found


def _masters(part: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """(parameter of the model, what the optimizer updates of it, where that begins in it)."""
    if isinstance(part, DistributedOptimizer):
        for parameter, (group, order) in part.model_param_group_index_map.items():
            main = part.optimizer.param_groups[group]["params"][order]
            yield parameter, main, part._get_model_param_range_map(parameter)["param"].start
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for parameters, masters in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from ((p, main, 0) for p, main in zip(parameters, masters, strict=True))
        yield from ((p, p, 0) for group in part.fp32_from_fp32_groups for p in group)
    else:
        yield from ((p, p, 0) for group in part.optimizer.param_groups for p in group["params"])


def _set_adam_step(optimizer: MegatronOptimizer, step: int) -> None:
    for part in optimizer_parts(optimizer):
        for group in part.optimizer.param_groups if part.optimizer is not None else ():
            group["step"] = step
