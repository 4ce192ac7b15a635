"""LoRA on one parallel linear layer of Megatron: y = W·x + scaling · B·A·dropout(x).

https://arxiv.org/abs/2106.09685. An adapter belongs to a Hugging Face module. A layer that fuses several (q, k, v;
gate, up) has an A and a B for each, so that PEFT would train the same. How these are split, and what travels:

                        A [r, in]          B [out, r]         A·x                       result
    column              whole              its rows           summed in backward        as the layer's
    column, sequence    whole, Σ grads     its rows           gathered over tokens      as the layer's
    row                 its columns        whole              summed                    as the layer's
    row, sequence       its columns        whole, Σ grads     reduce-scattered          as the layer's
    expert, column      whole, Σ grads     its rows           nothing                   as the layer's
    expert, row         its columns        whole, Σ grads     nothing                   summed by the dispatcher

Only tensors of width r travel. "Σ grads": each rank has the gradient of its own tokens or rows, and the sum is taken
over the group; for sequence parallelism by Megatron at the end of the step, for experts in the backward pass, where
they are split over ranks, since Megatron knows no such sum over expert tensor parallel ranks.

An expert's tokens are the same on all ranks that share it. Megatron's dispatcher gathers them before and sums the
partial outputs after, so here nothing may be summed twice.

T tokens, I inputs, O outputs, R rank of the adapter; a fused layer of M modules has M·R in place of R.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
)

from mca_lib.adapters.targets import modules
from mca_lib.converter.mapping import Segment
from mca_lib.converter.mappings import Row
from mca_lib.converter.plan import Entry
from mca_lib.models.config import McaModelConfig
from mca_lib.named_random import named_generator
from mca_lib.parallel import tensor_place

Span = tuple[int, int]
"""(First, behind the last) of consecutive rows or columns."""


def pieces(segments: Sequence[Segment]) -> tuple[Span, ...]:
    """What segments of one tensor cover, from its beginning on; neighbours are one piece."""
    found: list[Span] = []
    for _, start, stop in sorted(segments):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


class LoraPair(torch.nn.Module):
    """A and B of one Hugging Face module, as much of them as this rank has. fp32, whatever the model is.

    Args:
        name: of the module.
        shape: (outputs, inputs) of its weight.
        rows: this rank's outputs, in as many pieces as its layer has of the module, which may be none.
        columns: this rank's inputs.
    """

    def __init__(
        self, name: str, shape: tuple[int, int], rows: tuple[Span, ...], columns: Span, r: int, seed: int
    ) -> None:
        super().__init__()
        self.name, self.shape, self.rows, self.columns, self.r = name, shape, rows, columns, r
        self.lora_A = torch.nn.Parameter(initial_A(name, r, shape[1], seed)[:, slice(*columns)].clone())
        self.lora_B: torch.nn.Parameter | None = None
        if rows:
            self.lora_B = torch.nn.Parameter(torch.zeros(sum(stop - start for start, stop in rows), r))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A and B. Read them by a call: only then does Megatron's hook of `overlap_param_gather` bring their values."""
        return self.lora_A, self.lora_B


def initial_A(name: str, r: int, inputs: int, seed: int) -> torch.Tensor:
    """PEFT's initial A [r, inputs], fp32: uniform within ±1/√inputs, which is `kaiming_uniform_` with a=√5.

    It follows from the seed and the name alone, so that it is the same at every layout.
    """
    bound = inputs**-0.5
    return torch.empty(r, inputs).uniform_(-bound, bound, generator=named_generator(seed, name))


class LoraLinear(torch.nn.Module):
    """The adapters of one parallel linear layer.

    Args:
        entry: its row of the weight table.
        names: Hugging Face modules that have an adapter.
        dense: the weight that the adapters go beside.
        sequence_parallel: the layer's tokens are split over the tensor parallel ranks.
    """

    def __init__(
        self,
        entry: Entry,
        config: McaModelConfig,
        names: frozenset[str],
        dense: torch.nn.Parameter,
        *,
        r: int,
        scaling: float,
        dropout: float,
        seed: int,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        mapping = entry.mapping
        self.scaling, self.dropout = scaling, dropout
        self.is_expert, self.is_row = mapping.per_expert, isinstance(mapping, Row)
        self.sequence_parallel = sequence_parallel and not self.is_expert
        self.group = (
            parallel_state.get_expert_tensor_parallel_group()
            if self.is_expert
            else parallel_state.get_tensor_model_parallel_group()
        )
        segments = list(mapping.segments(config, *tensor_place().of(mapping)))
        shapes = mapping.hf_shapes(config)
        self.pairs = torch.nn.ModuleList()
        pair_of: dict[int, int] = {}
        for source, name in enumerate(modules(entry)):
            if name in names:
                pair_of[source] = len(self.pairs)
                mine = pieces([s for s in segments if s.source == source])
                outputs, inputs = shapes[source]
                rows, columns = (((0, outputs),), mine[0]) if self.is_row else (mine, (0, inputs))
                self.pairs.append(LoraPair(name, shapes[source], rows, columns, r, seed))
        self._blocks = [(pair_of.get(s.source), s) for s in segments]
        for pair in self.pairs:
            self._mark(pair, getattr(dense, "allreduce", True))

    def _mark(self, pair: LoraPair, allreduce: bool) -> None:
        """Tell Megatron what to sum, and what counts once in the gradient norm."""
        whole, split, dim = (pair.lora_B, pair.lora_A, 1) if self.is_row else (pair.lora_A, pair.lora_B, 0)
        whole.sequence_parallel = self.sequence_parallel
        whole.allreduce = allreduce
        if split is not None:
            split.allreduce = allreduce
            set_tensor_model_parallel_attributes(split, True, dim, 1)

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """What is added to the layer's output, in the dtype of its input."""
        matrices = [pair() for pair in self.pairs]
        hidden_TR = self._down(x_TI, [self._summed(A, not self.is_row).to(x_TI.dtype) for A, _ in matrices])
        if self.sequence_parallel and self.is_row:
            hidden_TR = reduce_scatter_to_sequence_parallel_region(hidden_TR, group=self.group)
        elif self.sequence_parallel:
            hidden_TR = gather_from_sequence_parallel_region(hidden_TR, group=self.group)
        elif self.is_row and not self.is_expert:
            hidden_TR = reduce_from_tensor_model_parallel_region(hidden_TR, group=self.group)
        elif not self.is_expert:
            hidden_TR = copy_to_tensor_model_parallel_region(hidden_TR, group=self.group)
        return F.linear(hidden_TR, self._up([B for _, B in matrices]).to(x_TI.dtype)) * self.scaling

    def _summed(self, matrix: torch.Tensor, whole: bool) -> torch.Tensor:
        """A matrix that all ranks sharing an expert hold whole, with a gradient that is summed over them."""
        return copy_to_tensor_model_parallel_region(matrix, group=self.group) if self.is_expert and whole else matrix

    def _down(self, x_TI: torch.Tensor, A_RI: Sequence[torch.Tensor]) -> torch.Tensor:
        """A·dropout(x) of every module, side by side; as in PEFT, each draws its own mask."""
        if not (self.dropout and self.training):
            return F.linear(x_TI, torch.cat(list(A_RI)))
        with self._dropout_state():
            return torch.cat([F.linear(F.dropout(x_TI, self.dropout), A) for A in A_RI], dim=-1)

    def _dropout_state(self) -> contextlib.AbstractContextManager[None]:
        """Inputs that ranks hold in common are masked alike, inputs of their own each its own way.

        Under sequence parallelism the transformer block already runs on the rank's own random state.
        """
        tracker = get_cuda_rng_tracker()
        if self.is_expert:
            own, common = get_expert_parallel_rng_tracker_name(), get_data_parallel_rng_tracker_name()
            return tracker.fork(own if self.is_row else common)
        return tracker.fork() if self.is_row and not self.sequence_parallel else contextlib.nullcontext()

    def _up(self, B_OR: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """B of all modules [O, M·R], its rows in the order of the fused layer's, zero where they are another's."""
        if self.is_row:
            return self._summed(B_OR[0], True)
        blocks = [self._block(B_OR, pair, segment) for pair, segment in self._blocks]
        return torch.cat(blocks) if len(blocks) > 1 else blocks[0]

    def _block(self, B_OR: Sequence[torch.Tensor | None], number: int | None, segment: Segment) -> torch.Tensor:
        count = len(self.pairs)
        if number is None:
            first = self.pairs[0]
            return first.lora_A.new_zeros(segment.stop - segment.start, count * first.r)
        pair = self.pairs[number]
        before = sum(max(0, min(stop, segment.start) - start) for start, stop in pair.rows)
        rows = B_OR[number][before : before + segment.stop - segment.start]
        return F.pad(rows, (number * pair.r, (count - 1 - number) * pair.r))

    def hook(self, layer: torch.nn.Module, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> tuple[Any, Any]:
        """Forward hook of the layer, which returns (output, bias)."""
        result, bias = output
        return result + self(_normalized(layer, inputs[0])), bias


def _normalized(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the layer's matrix is multiplied with: Transformer Engine's fused layer applies a norm first."""
    weight = getattr(layer, "layer_norm_weight", None)
    if weight is None:
        return x
    if getattr(layer, "zero_centered_gamma", False):
        weight = (1 + weight.float()).type_as(weight)
    return F.rms_norm(x, weight.shape, weight, layer.eps)
