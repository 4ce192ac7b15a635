"""`ModelConverter`: carries a plan out, tensor by tensor, in both directions.

It is bound to one config and holds no other state. Peak memory beyond the model is one fused tensor.

Every destination starts as NaN and every weight must be finite, so that what was not filled cannot pass for a weight;
every parameter is visited once, or it is an error.
"""

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, NoReturn

import torch

from mca_lib.converter.casts import beyond, cast, is_finite, narrows
from mca_lib.converter.file_tensor import FileTensor, Run
from mca_lib.converter.hf_source import HfSource
from mca_lib.converter.mapping import TensorPlace
from mca_lib.converter.plan import Entry, Plan, TensorInfo, fresh_entries, make_plan
from mca_lib.converter.stacked import whole
from mca_lib.errors import ModelError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.naming import checkpoint_parameters
from mca_lib.models.registry import weights_family

if TYPE_CHECKING:
    from mca_lib.models.language_model import McaLanguageModel

Progress = Callable[..., None]

_BAND = 16 << 20
"""Bytes, about, that two tensors are compared by."""


def no_progress(done: int, total: int, **metrics: object) -> None:
    """Reports nothing."""


class ModelConverter:
    """Hugging Face ⇄ Megatron for the model that `config` describes.

    Args:
        place: where this rank stands in its tensor parallel groups; None is one rank.
    """

    def __init__(self, config: McaModelConfig, place: TensorPlace | None = None) -> None:
        self.config = config
        self.place = place or TensorPlace()
        copies = weights_family(config).copies_of(config)
        self._copies = {name: of for name, of in copies.items() if name in config.source_copies}

    def plan(self, source: Mapping[str, TensorInfo]) -> Plan:
        """Raises ModelError listing the names that do not fit; reads no weights."""
        return make_plan(self.config, source)

    def check_targets(self, models: list["McaLanguageModel"], plan: Plan) -> None:
        """Raises ModelError when the parameters of the model and the targets of the plan are not the same.

        Fresh layers of a hybrid are targets too, although the plan does not fill them.

        A rank of a pipeline knows its own parameters only, and one of several expert parallel ranks its own experts, so
        that a target without one shows without: in the `convert` job, through which every model goes.
        """
        targets = plan.by_target() | {entry.mca: entry for entry in fresh_entries(self.config, plan)}
        held = {name: tuple(p.shape) for model in models for name, p in checkpoint_parameters(model)}
        for name, shape in held.items():
            if name not in targets:
                raise ModelError(f"the weight table of {self.config.model_type} has no row for {name}")
            expected = self._local_shape(targets[name])
            if shape != expected:
                raise ModelError(f"{name}: the model has shape {list(shape)}, the table {list(expected)}")
        spread = models[0].config.expert_model_parallel_size > 1
        absent = sorted(n for n in targets.keys() - held.keys() if not (spread and targets[n].mapping.per_expert))
        if absent and models[0].config.pipeline_model_parallel_size == 1:
            raise ModelError(f"the weight table of {self.config.model_type} has {absent[0]}, the model does not")

    @torch.no_grad()
    def load(
        self,
        models: Iterable["McaLanguageModel"],
        source: HfSource,
        plan: Plan | None = None,
        *,
        progress: Progress = no_progress,
    ) -> None:
        """Fill every parameter of the model chunks from the slices that this rank owns, cast to its dtype.

        Layers of a hybrid that the source, a transformer, does not have are left as they are.

        Raises:
            ModelError: the plan does not hold, and nothing has been read then; or a weight is NaN or infinite.
            ConfigError: a weight is too large for its parameter's dtype.
        """
        models = list(models)
        plan = plan or self.plan(source.tensors)
        self.check_targets(models, plan)
        targets = plan.by_target()
        fresh = {entry.mca for entry in fresh_entries(self.config, plan)}
        parameters = [p for model in models for p in checkpoint_parameters(model) if p[0] not in fresh]
        for done, (name, parameter) in enumerate(parameters):
            entry = targets.pop(name, None)
            if entry is None:
                raise RuntimeError(f"{name}: filled twice")
            self._fill(parameter.data, entry, source, plan)
            progress(done + 1, len(parameters))

    def read(self, entry: Entry, source: HfSource, plan: Plan, destination: torch.Tensor) -> None:
        """Fill a contiguous CPU tensor of the source's dtype with this rank's share of a target.

        Raises:
            ModelError: a weight is NaN or infinite, or a tensor differs from the one that it must be a copy of.
        """
        destination.fill_(float("nan"))
        parts = [source.slice(name) for name in entry.hf]
        entry.mapping.fill(destination, parts, self.config, *self.place.of(entry.mapping))
        self.check(entry, source, plan, destination)

    def check(self, entry: Entry, source: HfSource, plan: Plan, tensor: torch.Tensor) -> None:
        """Check this rank's share of a target, as it was read.

        Raises:
            ModelError: a weight is NaN or infinite, or a tensor differs from the one that it must be a copy of.
        """
        if not is_finite(tensor):
            _raise_not_finite(entry, source)
        for copy, of in plan.copies.items():
            if of in entry.hf:
                self._compare(copy, of, entry, source)

    def to_hf(
        self, entry: Entry, tensor: torch.Tensor, dtypes: Mapping[str, torch.dtype]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor) that the whole tensor of an entry makes, cast to `dtypes`; copies included.

        Raises ConfigError when a value is too large for the dtype.
        """
        for name, value in zip(entry.hf, entry.mapping.to_hf(tensor, self.config), strict=True):
            for written in (name, *(copy for copy, of in self._copies.items() if of == name)):
                yield written, cast(written, value, dtypes[whole(written)])

    def hf_runs(self, entry: Entry, tensor: FileTensor) -> list[tuple[str, list[Run]]] | None:
        """`to_hf` without a cast, as bytes of the file that holds the tensor; None where it is more than those."""
        values = entry.mapping.hf_runs(tensor, self.config)
        if values is None:
            return None
        return [
            (written, runs)
            for name, runs in zip(entry.hf, values, strict=True)
            for written in (name, *(copy for copy, of in self._copies.items() if of == name))
        ]

    def _local_shape(self, entry: Entry) -> tuple[int, ...]:
        return entry.mapping.local_shape(self.config, *self.place.of(entry.mapping))

    def _fill(self, parameter: torch.Tensor, entry: Entry, source: HfSource, plan: Plan) -> None:
        dtype = source.dtype(entry.hf[0])
        if parameter.device.type == "cpu" and parameter.dtype == dtype and parameter.is_contiguous():
            self.read(entry, source, plan, parameter)
            return
        value = torch.empty(parameter.shape, dtype=dtype)
        self.read(entry, source, plan, value)
        parameter.copy_(value)
        if narrows(dtype, parameter.dtype) and not is_finite(parameter):
            _raise_beyond(entry, source, parameter.dtype)

    def _compare(self, copy: str, of: str, entry: Entry, source: HfSource) -> None:
        """Raise ModelError when a tensor that the source stores twice differs within this rank's share."""
        first, second = source.slice(of), source.slice(copy)
        shape = source.tensors[of].shape
        step = max(1, _BAND // (4 * prod(shape) // shape[entry.mapping.axis]))
        lead = (slice(None),) * entry.mapping.axis
        for number, start, stop in entry.mapping.segments(self.config, *self.place.of(entry.mapping)):
            if number != entry.hf.index(of):
                continue
            for low in range(start, stop, step):
                index = (*lead, slice(low, min(low + step, stop)))
                # As an export writes the copy; bytes, since +0 equals -0.
                if not _same_bytes(first[index].to(second.dtype), second[index]):
                    hint = "set tie_word_embeddings to false or " if self.config.tie_word_embeddings else ""
                    raise ModelError(
                        f"{source.file(copy)}: {copy} differs from {of}, of which the model's config makes it a copy; "
                        f"{hint}remove the tensor"
                    )


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _raise_not_finite(entry: Entry, source: HfSource) -> NoReturn:
    """Say which of the tensors holds the value; they are read whole, since a rank may own no more than a slice."""
    for name in entry.hf:
        if not is_finite(source.slice(name)[:]):
            raise ModelError(f"{source.file(name)}: {name} holds NaN or an infinite value; fetch the model again")
    raise RuntimeError(f"{entry.mca}: the weight table leaves a part of it unset")


def _raise_beyond(entry: Entry, source: HfSource, dtype: torch.dtype) -> NoReturn:
    """Say which of the tensors has the value; they are read whole, as above."""
    for name in entry.hf:
        value = source.slice(name)[:]
        if not is_finite(value.to(dtype)):
            raise beyond(f"{source.file(name)}: {name}", value, dtype)
    raise RuntimeError(f"{entry.mca}: infinite after a cast to {dtype}, none of its sources is")
