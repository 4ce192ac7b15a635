"""`ModelConverter`: carries a plan out, tensor by tensor, in both directions.

It is bound to one config and holds no other state. Peak memory beyond the model is one fused tensor.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from mca_lib.converter.hf_source import HfSource
from mca_lib.converter.mappings import TensorPlace
from mca_lib.converter.plan import EMBEDDING, Entry, Plan, TensorInfo, entries, make_plan
from mca_lib.errors import ModelError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.naming import checkpoint_parameters

if TYPE_CHECKING:
    from mca_lib.models.gpt import McaGPTModel

Progress = Callable[..., None]


class MegatronTensors(Protocol):
    """Whole tensors of a Megatron model by their name in the checkpoint."""

    def read(self, name: str) -> torch.Tensor: ...


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

    def plan(self, source: Mapping[str, TensorInfo]) -> Plan:
        """Raises ModelError listing the names that do not fit; reads no weights."""
        return make_plan(self.config, source)

    def check_targets(self, models: list["McaGPTModel"], plan: Plan) -> None:
        """Raises ModelError when the parameters of the model and the targets of the plan are not the same.

        A rank of a pipeline knows its own parameters only, so that a target without one shows without a pipeline:
        in the `convert` job, through which every model goes.
        """
        targets = plan.by_target()
        held = {name: tuple(p.shape) for model in models for name, p in checkpoint_parameters(model)}
        for name, shape in held.items():
            if name not in targets:
                raise ModelError(f"the weight table of {self.config.model_type} has no row for {name}")
            expected = self._local_shape(targets[name])
            if shape != expected:
                raise ModelError(f"{name}: the model has shape {list(shape)}, the table {list(expected)}")
        if models[0].config.pipeline_model_parallel_size == 1 and (absent := sorted(targets.keys() - held.keys())):
            raise ModelError(f"the weight table of {self.config.model_type} has {absent[0]}, the model does not")

    @torch.no_grad()
    def load(
        self,
        models: Iterable["McaGPTModel"],
        source: HfSource,
        plan: Plan | None = None,
        *,
        keep_dtype: bool = False,
        progress: Progress = no_progress,
    ) -> None:
        """Fill every parameter of the model chunks from the slices that this rank owns.

        Args:
            keep_dtype: parameters take the source's dtypes; else values are cast to the parameters' own.

        Raises:
            ModelError: the plan does not hold, and nothing has been read then; or a weight is NaN or infinite.
        """
        models = list(models)
        plan = plan or self.plan(source.tensors)
        self.check_targets(models, plan)
        targets = plan.by_target()
        parameters = [pair for model in models for pair in checkpoint_parameters(model)]
        for done, (name, parameter) in enumerate(parameters):
            value = self._read(targets[name], source, plan)
            if keep_dtype:
                parameter.data = value.to(parameter.device)
            else:
                parameter.copy_(value)
            progress(done + 1, len(parameters))

    def to_hf(self, tensors: MegatronTensors, dtypes: Mapping[str, torch.dtype]) -> Iterable[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor) one by one, cast to `dtypes`; needs the whole model's tensors."""
        for entry in entries(self.config):
            values = entry.mapping.to_hf(tensors.read(entry.mca), self.config)
            for name, value in zip(entry.hf, values, strict=True):
                yield name, value.to(dtypes[name])

    def _local_shape(self, entry: Entry) -> tuple[int, ...]:
        return entry.mapping.local_shape(self.config, *self.place.of(entry.mapping))

    def _read(self, entry: Entry, source: HfSource, plan: Plan) -> torch.Tensor:
        value = self._slices(entry.hf, entry, source)
        if plan.redundant_head and entry.hf == (EMBEDDING,):
            head = self._slices((plan.redundant_head,), entry, source)
            if not torch.equal(value, head.to(value.dtype)):
                raise ModelError(
                    f"tie_word_embeddings is true, but {plan.redundant_head} differs from {EMBEDDING}; "
                    "set it to false in config.json or remove the tensor"
                )
        return value

    def _slices(self, names: tuple[str, ...], entry: Entry, source: HfSource) -> torch.Tensor:
        parts = [source.slice(name) for name in names]
        value = entry.mapping.to_mca(parts, self.config, *self.place.of(entry.mapping))
        if not value.isfinite().all():
            _raise_not_finite(names, source)
        return value


def _raise_not_finite(names: tuple[str, ...], source: HfSource) -> None:
    """Say which of the tensors holds the value; they are read whole, since a rank may own no more than a slice."""
    name = next(name for name in names if not source.slice(name)[:].isfinite().all())
    raise ModelError(f"{source.file(name)}: {name} holds NaN or an infinite value; fetch the model again")
