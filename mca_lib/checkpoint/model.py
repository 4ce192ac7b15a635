"""Model weights as a torch_dist checkpoint: saved from any layout, loaded at any layout.

What is stored does not depend on the layout: the padding of the vocabulary is stripped on save and zero after a load,
and nothing but weights is kept. Loading fills the parameters in place, casts to their dtype, and proves that it
reached every element.
"""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
    gpt_compatible_layer_maps,
    retarget_sharded_state_dict_to_gpt_checkpoint,
)
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
)
from torch.distributed.checkpoint.api import CheckpointException

from mca_lib.checkpoint.collective import from_rank_0
from mca_lib.checkpoint.reader import CheckpointReader
from mca_lib.checkpoint.verify import verify_model
from mca_lib.converter.casts import beyond, is_finite, narrows
from mca_lib.errors import CheckpointError, ResourceError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.hybrid.names import transformer_name
from mca_lib.models.naming import checkpoint_parameters

if TYPE_CHECKING:
    from mca_lib.models.language_model import McaLanguageModel

_FULL = 64 << 20
"""Bytes; a disk with less left is taken to be full."""

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def save_model(models: list["McaLanguageModel"], directory: str | Path) -> None:
    """Write the weights into `directory`, which must be new or empty; collective over all ranks."""
    directory = Path(directory)

    def make() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise CheckpointError(f"{directory}: not empty; a checkpoint is written into a new directory")

    from_rank_0(make)
    tensors = _sharded_tensors(models)
    vocab_size = models[0].mca_config.vocab_size
    stripped = {k: t for k, v in tensors.items() if (t := _without_padding(v, vocab_size)) is not None}
    with translated_failures(directory, "written"):
        dist_checkpointing.save(stripped, str(directory))


@torch.no_grad()
def load_model(
    models: list["McaLanguageModel"], directory: str | Path, stored: McaModelConfig | None = None
) -> CheckpointReader:
    """Fill the parameters of this rank's model chunks; collective over all ranks. Returns the open checkpoint.

    Args:
        stored: config of the checkpoint, where it differs from the models'. Its vocabulary may be smaller: rows beyond
            it are zero. It may be the transformer of a hybrid: layers without a counterpart are left as they are.

    Raises:
        CheckpointError: the checkpoint is not whole, is of another model, or left an element unset.
        ConfigError: a weight is too large for its parameter's dtype.
    """
    config = models[0].mca_config
    stored = stored or config
    reader = verify_model(directory, stored)
    layers = config.layer_map if config.hybrid is not None and stored.hybrid is None else None
    parameters = [
        (source, parameter)
        for model in models
        for name, parameter in checkpoint_parameters(model)
        if (source := name if layers is None else transformer_name(name, layers)) is not None
    ]
    for _, parameter in parameters:
        parameter.fill_(float("nan"))
    tensors = _sharded_tensors(models)
    if layers is not None:
        retarget_sharded_state_dict_to_gpt_checkpoint(tensors, gpt_compatible_layer_maps(layers.layers))
        tensors = {k: v for k, v in tensors.items() if not isinstance(v, LocalNonpersistentObject)}
    # Built here, not by `load`: that would merge the halves of every gated MLP into copies of the weights, and the
    # shards are views of the parameters already.
    apply_factories(tensors)
    with translated_failures(directory, "read"):
        dist_checkpointing.load(tensors, str(directory))
    for name, parameter in parameters:
        if not is_finite(parameter):
            _check_infinite(name, parameter, reader)
    return reader


def _check_infinite(name: str, parameter: torch.Tensor, reader: CheckpointReader) -> None:
    """Accept an infinity that is stored; raise on NaN, and on one that the cast to the parameter's dtype has made."""
    if parameter.isnan().any():
        raise CheckpointError(f"{reader.directory}: {name} holds NaN or was not loaded in full")
    stored = reader.read(name)
    if narrows(stored.dtype, parameter.dtype) and not is_finite(stored.to(parameter.dtype)):
        raise beyond(f"{reader.directory}: {name}", stored, parameter.dtype)


@contextlib.contextmanager
def translated_failures(directory: Path, action: str) -> Iterator[None]:
    """Turn what torch raises when a checkpoint cannot be written or read into errors of ours.

    Its CheckpointException is a BaseException, which `except Exception` lets pass, and has lost the cause: a full disk
    is told by the space that is left (torch 2.15).
    """
    try:
        yield
    except CheckpointException as e:
        if action == "written" and shutil.disk_usage(directory).free < _FULL:
            raise ResourceError(f"{directory}: no space left on the disk; free space and run again") from e
        cause = next(iter(e.failures.values()), ("unknown",))[0]
        raise CheckpointError(f"{directory}: cannot be {action}: {str(cause).splitlines()[0]}") from e


def _sharded_tensors(models: list["McaLanguageModel"]) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """The chunks' tensors as Megatron describes them, without the objects that only quantized training needs."""
    return {
        f"{chunk}.{name}": value
        for chunk, model in enumerate(models)
        for name, value in _flat(model.sharded_state_dict())
        if isinstance(value, ShardedTensor | ShardedTensorFactory)
    }


def _flat(tree: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


def _without_padding(
    tensor: ShardedTensor | ShardedTensorFactory, vocab_size: int
) -> ShardedTensor | ShardedTensorFactory | None:
    """The shard without rows beyond the vocabulary; None when nothing is left of it."""
    if tensor.key not in _VOCABULARY or not isinstance(tensor, ShardedTensor):
        return tensor
    if tensor.global_shape[0] == vocab_size:
        return tensor
    rows = min(tensor.local_shape[0], vocab_size - tensor.global_offset[0])
    if rows <= 0:
        return None
    data = tensor.data[:rows]
    return replace(
        tensor,
        data=data,
        local_shape=tuple(data.shape),
        global_shape=(vocab_size, *tensor.global_shape[1:]),
        axis_fragmentations=None,  # the shares are no longer equal
    )
