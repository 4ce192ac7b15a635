"""`VirtualModels`: the model chunks that one rank holds; `PretrainedModel`: making them from a directory.

A rank holds one chunk, or with an interleaved pipeline schedule several. `VirtualModels` is that list and the
operations that concern all of them: state dicts, saving, exporting.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from mca_lib.checkpoint.collective import from_rank_0, new_passage
from mca_lib.checkpoint.model import load_model, save_model
from mca_lib.checkpoint.side_files import copy_side_files
from mca_lib.checkpoint.verify import WEIGHTS_FOLDER
from mca_lib.converter.hf_source import HfSource
from mca_lib.converter.model_converter import ModelConverter
from mca_lib.converter.unchanged import Stamps
from mca_lib.errors import ConfigError, DataError
from mca_lib.models import size
from mca_lib.models.config import McaModelConfig, is_mca_checkpoint
from mca_lib.models.flops import training_flops
from mca_lib.models.hybrid.fresh import fill_fresh_layers
from mca_lib.models.hybrid.run_config import run_config
from mca_lib.models.layout import ARGUMENTS
from mca_lib.models.naming import checkpoint_parameters
from mca_lib.models.packing import document_bounds, zigzag_index
from mca_lib.models.transformer_config import transformer_config
from mca_lib.models.vocabulary import GrownSource, fill_new_rows, with_vocabulary, zero_padding
from mca_lib.parallel import tensor_place
from mca_lib.tokenizer import tokenizer_size

if TYPE_CHECKING:
    from peft import LoraConfig


class VirtualModels:
    """This rank's model chunks, in the order of the pipeline."""

    def __init__(
        self,
        cls: type["PretrainedModel"],
        mca_config: McaModelConfig,
        config: TransformerConfig,
        source: Path | None = None,
    ) -> None:
        chunks = config.virtual_pipeline_model_parallel_size
        self.mca_config = mca_config
        self.config = config
        """Megatron's config, one object shared by all chunks."""
        self.source = source
        """Directory that the model came from: tokenizer and generation config are copied from it."""
        self.lora_config: LoraConfig | None = None
        """Of the adapters, once `mca_lib.adapters.apply_megatron_lora` has put them on."""
        self.base_digest: str | None = None
        """Of the weights that training starts from, where the caller knows it."""
        self.models = [cls(mca_config, config, vp_stage=i if chunks else None) for i in range(chunks or 1)]

    def __repr__(self) -> str:
        sizes = {name: getattr(self.config, argument) for name, argument in ARGUMENTS.items()}
        # A pipeline of its own layout is an object of Megatron, of many lines.
        told = [f"{name}={size}" for name, size in sizes.items() if isinstance(size, int) and size not in (1, False)]
        layout = " ".join(told) or "one rank"
        count = len(self.models)
        return (
            f"VirtualModels({self.mca_config.model_type}, {self.num_parameters():,} parameters on this rank, "
            f"{count} chunk{'s' * (count > 1)}, {layout})"
        )

    def __call__(self, *_: Any, **__: Any) -> None:
        """There is no call: a rank may hold several chunks, and a pipeline passes between them."""
        raise TypeError(
            "a list of model chunks is not called; call one, models[0](input_ids, position_ids), or with a pipeline "
            "Megatron's forward_backward_func with list(models)"
        )

    def __len__(self) -> int:
        return len(self.models)

    def __getitem__(self, index: int) -> "PretrainedModel":
        return self.models[index]

    def __iter__(self) -> Iterator["PretrainedModel"]:
        return iter(self.models)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Of all chunks."""
        for model in self.models:
            yield from model.parameters()

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Of all chunks, under their names in the checkpoint."""
        for model in self.models:
            yield from ((n, p) for n, p in checkpoint_parameters(model) if isinstance(p, torch.nn.Parameter))

    def num_parameters(self, total: bool = False) -> int:
        """Weights that this rank holds, or with `total` those of the whole model, each once and without padding.

        Counted is what a checkpoint of the model stores: the biases that balance experts are among it, though no
        gradient reaches them, and adapters are not.
        """
        if total:
            return size.total(self.mca_config)
        return sum(tensor.numel() for model in self.models for _, tensor in checkpoint_parameters(model))

    def num_floating_point_operations(self, tokens: int, sequence_length: int) -> int:
        """Of a training step of the whole model over `tokens` in sequences of `sequence_length`.

        Forward and backward, a matrix product [m, k] x [k, n] as 2·m·n·k, attention as far as the mask lets see; the
        formula is in `mca_lib.models.flops`.
        """
        return training_flops(self.mca_config, tokens, sequence_length)

    def train(self, mode: bool = True) -> Self:
        for model in self.models:
            model.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """{"model": ...}, or {"model0": ..., "model1": ...} for several chunks: Megatron's convention."""
        return {key: m.state_dict() for key, m in zip(self._keys(), self.models, strict=True)}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Inverse of `state_dict`."""
        for key, model in zip(self._keys(), self.models, strict=True):
            model.load_state_dict(state_dict[key], strict=strict)

    def sharded_state_dict(self, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """Megatron's description of the state, for checkpoints of a training run; the vocabulary is padded in it.

        The model alone is written by `save_pretrained`, without padding.
        """
        return {key: m.sharded_state_dict(metadata=metadata) for key, m in zip(self._keys(), self.models, strict=True)}

    def save_pretrained(self, directory: str | Path) -> None:
        """Write an MCA checkpoint directory, without the vocabulary's padding; collective over all ranks.

        The config comes last: a directory without it is no checkpoint. With adapters, a PEFT adapter directory is
        written in its place: these alone were trained.
        """
        directory = Path(directory)
        if self.lora_config is not None:
            from mca_lib.adapters.peft_files import save_adapter

            save_adapter(self, directory)
            return
        save_model(self.models, directory / WEIGHTS_FOLDER)

        def finish() -> None:
            if self.source is not None:
                copy_side_files(self.source, directory)
            self.mca_config.save_pretrained(directory)

        from_rank_0(finish)

    def save_pretrained_as_hf(self, directory: str | Path, *, dtype: str = "auto", max_shard_size: str = "5GB") -> None:
        """Write a Hugging Face directory; collective over all ranks. See `mca_lib.converter.export.export_hf`.

        Goes through a torch_dist checkpoint beside it, so that no rank gathers more than one tensor.
        """
        from mca_lib.converter.export import export_hf

        if self.lora_config is not None:
            raise ConfigError(f"{directory}: it has adapters, which save_pretrained writes and export_hf merges")
        directory = Path(directory)
        passage = Path(from_rank_0(lambda: new_passage(directory)))
        try:
            self.save_pretrained(passage)
            from_rank_0(lambda: export_hf(passage, directory, dtype=dtype, max_shard_size=max_shard_size))
        finally:
            if dist.get_rank() == 0:
                shutil.rmtree(passage, ignore_errors=True)

    def get_batch_on_this_cp_rank(
        self, batch: dict[str, Any], packed_seq_params: PackedSeqParams | None = None
    ) -> dict[str, Any]:
        """See `PretrainedModel.get_batch_on_this_cp_rank`."""
        return self.models[0].get_batch_on_this_cp_rank(batch, packed_seq_params)

    def _keys(self) -> list[str]:
        return ["model"] if len(self.models) == 1 else [f"model{i}" for i in range(len(self.models))]


class PretrainedModel(MegatronModule):
    """What every model class of this package can do; mixed into a model class of Megatron."""

    config_class = McaModelConfig
    mca_config: McaModelConfig

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        args: object | None = None,
        *,
        use_cpu_initialization: bool | None = None,
        tokenizer: Any | None = None,
    ) -> VirtualModels:
        """The model of an MCA checkpoint directory or of a Hugging Face one, at the layout of `args`.

        Each rank reads only what it owns; weights are cast to the dtype that `args` ask for. Collective.

        Args:
            args: the layout and the precision, of `mca_lib.parallel.DistributingParallelArguments` or of the training
                arguments, which have `bf16` and `fp16` too; without these weights are fp32. None is one rank in fp32.
                The process groups must be there (`initialize_model_parallel`), at the same layout.
            tokenizer: where it has more tokens than the vocabulary has rows, rows are added (see `vocabulary`), which
                the config then records. A vocabulary never shrinks.

        Raises:
            ModelError, CheckpointError: the directory is unsupported, incomplete or inconsistent.
            ConfigError: the model cannot be laid out as `args` ask.
        """
        _require_model_parallel()
        directory = Path(directory)
        stamps = Stamps.of(directory)
        mca_config = cls.config_class.from_pretrained(directory)
        size = tokenizer_size(tokenizer) if tokenizer is not None else 0
        grown = with_vocabulary(run_config(mca_config, args), size)
        if is_mca_checkpoint(directory):
            models = cls._empty(grown, args, use_cpu_initialization, directory)
            reader = load_model(models.models, directory / WEIGHTS_FOLDER, mca_config)
            fill_new_rows(models.models, reader, mca_config.vocab_size, grown.vocab_size)
            fill_fresh_layers(models, mca_config, args)
            return models
        converter = ModelConverter(grown, tensor_place())
        with HfSource(directory) as stored:
            source = GrownSource(stored, mca_config, grown.vocab_size) if grown is not mca_config else stored
            plan = converter.plan(source.tensors)
            models = cls._empty(plan.config(grown), args, use_cpu_initialization, directory)
            converter.load(models, source, plan)
        stamps.check()
        fill_fresh_layers(models, mca_config, args)
        return models

    @classmethod
    def from_config(
        cls, mca_config: McaModelConfig, args: object | None = None, *, use_cpu_initialization: bool | None = None
    ) -> VirtualModels:
        """A model with random weights, which depend on the layout: each rank draws its own shares."""
        _require_model_parallel()
        models = VirtualModels(
            cls, mca_config, transformer_config(mca_config, args, use_cpu_initialization=use_cpu_initialization)
        )
        for model in models:
            zero_padding(model)
        return models

    @classmethod
    def _empty(
        cls, mca_config: McaModelConfig, args: object | None, use_cpu_initialization: bool | None, source: Path
    ) -> VirtualModels:
        config = transformer_config(
            mca_config, args, use_cpu_initialization=use_cpu_initialization, perform_initialization=False
        )
        return VirtualModels(cls, mca_config, config, source)

    def get_batch_on_this_cp_rank(
        self, batch: dict[str, Any], packed_seq_params: PackedSeqParams | None = None
    ) -> dict[str, Any]:
        """This context parallel rank's tokens of every [B, T] tensor of `batch`; the rest passes through.

        Raises DataError when a sequence or packed document does not divide by twice the context parallel size, or when
        the tensors have several T.
        """
        ranks = self.config.context_parallel_size
        if ranks == 1:
            return batch
        lengths = {k: v.shape[1] for k, v in batch.items() if isinstance(v, torch.Tensor) and v.ndim == 2}
        if len(set(lengths.values())) != 1:
            found = ", ".join(f"{name} {length}" for name, length in lengths.items()) or "no such tensor"
            raise DataError(f"the [B, T] tensors of a batch must have one T to be shared among ranks; found {found}")
        length = lengths[next(iter(lengths))]
        bounds = [0, length] if packed_seq_params is None else document_bounds(packed_seq_params)
        if bounds[-1] < length:
            bounds.append(length)  # trailing padding, as in `packing.cover_row`
        index = zigzag_index(bounds, ranks)[parallel_state.get_context_parallel_rank()]
        return {k: v.index_select(1, index.to(v.device)) if k in lengths else v for k, v in batch.items()}


def _require_model_parallel() -> None:
    if not parallel_state.model_parallel_is_initialized():
        raise RuntimeError("call mca_lib.parallel.initialize_model_parallel(args) before making a model")
