"""All adapters of one model chunk: putting them on, their state in a checkpoint, their names.

In a checkpoint an adapter has the names of a PEFT file, whole tensors whatever the layout:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight    [r, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight    [out, r]
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from mca_lib.adapters.lora import LoraLinear, LoraPair, Span
from mca_lib.adapters.peft_files import peft_name
from mca_lib.adapters.settings import check_lora_config, scaling, targets_of
from mca_lib.adapters.targets import WEIGHT, linear_layers, target_names
from mca_lib.errors import ConfigError
from mca_lib.models.freeze import let_gradients_through
from mca_lib.models.naming import EXPERT, checkpoint_parameters

if TYPE_CHECKING:
    from peft import LoraConfig

    from mca_lib.converter.plan import Entry
    from mca_lib.models.gpt import McaGPTModel
    from mca_lib.models.model_factory import VirtualModels


class Adapters(torch.nn.Module):
    """The adapters of a chunk, layer by layer. They stay fp32 when the model is cast."""

    def __init__(self, layers: list[LoraLinear]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[()] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor | ShardedTensorFactory]:
        """Own name of every parameter → where it lies in the whole tensor."""
        return {
            f"{prefix}layers.{i}.pairs.{j}.{matrix}": sharded
            for i, layer in enumerate(self.layers)
            for j, pair in enumerate(layer.pairs)
            for matrix, sharded in _sharded(layer, pair)
        }

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)


def _sharded(layer: LoraLinear, pair: LoraPair) -> Iterator[tuple[str, ShardedTensor | ShardedTensorFactory]]:
    replica = (
        parallel_state.get_expert_data_parallel_rank()
        if layer.is_expert
        else parallel_state.get_data_parallel_rank(with_context_parallel=True)
    )
    outputs, inputs = pair.shape
    for matrix, parameter, shape, offset in (
        ("lora_A", pair.lora_A, (pair.r, inputs), (0, pair.columns[0])),
        ("lora_B", pair.lora_B, (outputs, pair.r), (pair.rows[0][0] if pair.rows else 0, 0)),
    ):
        if parameter is None:
            continue
        copies = layer.group.rank() if tuple(parameter.shape) == shape else 0
        sharded = ShardedTensor(
            key=peft_name(pair.name, matrix),
            data=parameter,
            dtype=parameter.dtype,
            local_shape=tuple(parameter.shape),
            global_shape=shape,
            global_offset=offset,
            axis_fragmentations=None,  # the shares need not be equal
            replica_id=(0, copies, replica),
        )
        yield matrix, _in_pieces(sharded, pair.rows) if matrix == "lora_B" and len(pair.rows) > 1 else sharded


def _in_pieces(whole: ShardedTensor, rows: tuple[Span, ...]) -> ShardedTensorFactory:
    """Rows that lie end to end here, and apart in the module."""

    def build(key: str, tensor: torch.Tensor, replica_id: tuple[int, int, int], _: None) -> list[ShardedTensor]:
        split = tensor.split([stop - start for start, stop in rows])
        return [
            replace(
                whole,
                key=key,
                data=part,
                dtype=part.dtype,
                local_shape=tuple(part.shape),
                global_offset=(start, 0),
                replica_id=replica_id,
            )
            for (start, _), part in zip(rows, split, strict=True)
        ]

    return ShardedTensorFactory(whole.key, whole.data, build, torch.cat, whole.replica_id)


def apply_megatron_lora(models: "VirtualModels", lora: "LoraConfig", seed: int = 42) -> None:
    """Freeze every chunk of this rank and put adapters on its linear layers; collective.

    Args:
        seed: of the initial A.

    Raises:
        ConfigError: the settings are not supported, name what the model does not have, or leave a pipeline stage
            without any adapter.
    """
    check_lora_config(lora)
    if models.lora_config is not None:
        raise RuntimeError("the model has adapters already")
    names = target_names(models.mca_config, targets_of(lora))
    entries = {entry.mca: entry for entry in linear_layers(models.mca_config)}
    for model in models:
        model.requires_grad_(False)
        set_linear_is_expert(model)
        layers = [_adapted(model, entry, names, lora, seed, *found) for entry, *found in _linears(model, entries)]
        model.adapters = Adapters([layer for layer in layers if layer is not None])
        if model.pre_process:
            let_gradients_through(model)
    _check_stages(models)
    models.lora_config = lora


def set_linear_is_expert(model: "McaGPTModel") -> None:
    """Mark the linear layers of experts, whose class need not know (Transformer Engine's does not)."""
    for (own, _), (name, _) in zip(model.named_parameters(), checkpoint_parameters(model), strict=False):
        if EXPERT.search(name):
            model.get_submodule(own.rpartition(".")[0]).is_expert = True


def _linears(
    model: "McaGPTModel", entries: dict[str, "Entry"]
) -> list[tuple["Entry", torch.nn.Module, torch.nn.Parameter]]:
    """(Row of the weight table, layer, its weight) of every linear layer that the chunk holds."""
    found = []
    for (own, parameter), (name, same) in zip(model.named_parameters(), checkpoint_parameters(model), strict=False):
        assert parameter is same, "parameters come before buffers, in one order"
        if name in entries:
            found.append((entries[name], model.get_submodule(own.rpartition(".")[0]), parameter))
    return found


def _adapted(
    model: "McaGPTModel",
    entry: "Entry",
    names: frozenset[str],
    lora: "LoraConfig",
    seed: int,
    layer: torch.nn.Module,
    weight: torch.nn.Parameter,
) -> LoraLinear | None:
    """Adapters beside a layer; None when none of its modules is a target."""
    if not names & {name.removesuffix(WEIGHT) for name in entry.hf}:
        return None
    if not hasattr(layer, "weight"):
        raise ConfigError(
            "lora.target_modules: adapters on grouped experts (Transformer Engine's layer that holds all experts of a "
            "rank) are not supported; name the modules of the attention alone"
        )
    if getattr(layer, "gather_output", False):
        raise NotImplementedError(f"{entry.mca}: the layer gathers its output, its adapters would not")
    adapter = LoraLinear(
        entry,
        model.mca_config,
        names,
        weight,
        r=lora.r,
        scaling=scaling(lora.r, lora.lora_alpha, lora.use_rslora),
        dropout=lora.lora_dropout,
        seed=seed,
        sequence_parallel=model.config.sequence_parallel,
    )
    layer.register_forward_hook(adapter.hook)
    return adapter


def _check_stages(models: "VirtualModels") -> None:
    """Megatron's optimizer and pipeline want something to train in every chunk. All ranks say so together."""
    empty = torch.tensor(int(any(not len(model.adapters.layers) for model in models)))
    device = next(models.parameters()).device
    empty = empty.to(device)
    dist.all_reduce(empty, op=dist.ReduceOp.MAX)
    if empty:
        raise ConfigError(
            "lora.target_modules: a pipeline stage holds none of the modules, and would have nothing to train; "
            "name more modules, or use another parallel.pipeline_layout"
        )
