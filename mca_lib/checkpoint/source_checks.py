"""What a run cannot start from, said before a model is built; see `mca_lib.checkpoint.source`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mca_lib.checkpoint.source import Source, TorchDist, open_source
from mca_lib.errors import CheckpointError, ConfigError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.hybrid.pattern import check_translatable
from mca_lib.models.hybrid.run_config import run_config
from mca_lib.trainers.training_args import TrainingArguments

_SHAPES = ("model_type", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")
"""Names in the identity of a run that decide the shapes of the weights, beside the number of layers."""

_OTHER_BY_DESIGN = ("num_layers", "base model", "hybrid", "load_checkpoint")
"""Names in the identity of a run in which a hybrid differs from the transformer that it goes on from."""


_OWN_MODEL = "give the model that it was made from as model_name_or_path"


def check_start(directory: str | Path, args: TrainingArguments, *, lora: bool = False) -> None:
    """Refuse what the model of a directory cannot become, and what it cannot go on from; no tensor is read.

    Args:
        lora: adapters alone are trained.

    Raises ConfigError or CheckpointError, with the reason and what to change.
    """
    base = McaModelConfig.from_pretrained(directory)
    config = run_config(base, args)
    if lora and config.mamba_layers and base.hybrid is None:
        raise ConfigError(
            f"hybrid_layer_pattern={args.hybrid_layer_pattern!r} with finetuning_type='lora': Mamba layers have no "
            "adapters, so that fresh ones would be neither trained nor saved; use finetuning_type='full'"
        )
    if args.load_checkpoint is not None:
        check_source(open_source(args.load_checkpoint), config, args)


def check_source(source: Source, config: McaModelConfig, args: TrainingArguments) -> None:
    """Raise CheckpointError or ConfigError, with the reason and what to change, where the run cannot start from it.

    Args:
        config: of the model that the run trains (`run_config`).
    """
    where = f"load_checkpoint={str(source.path)!r}"
    if source.contents.is_hybrid:
        _check_hybrid(source, config, where)
    else:
        _check_transformer(source, config, args, where)
    _check_shapes(source, config, where)
    _check_parts(source, config, where)
    if not args.no_load_optim:
        _check_optimizer(source, args, where)


def check_run(source: Source, run: Mapping[str, Any], *, finetune: bool) -> None:
    """Compare the settings of this run with those that a source was made with.

    With `finetune` progress starts anew, and only the model has to be the same. Without it everything has, but for
    what a hybrid differs in by design.

    Raises CheckpointError naming what differs.
    """
    names = [n for n in (_SHAPES if finetune else run) if n in source.run and n not in _OTHER_BY_DESIGN]
    differing = [n for n in names if n in run and source.run[n] != run[n]]
    if differing:
        shown = ", ".join(f"{n}={source.run[n]!r} and not {run[n]!r}" for n in differing)
        hint = _OWN_MODEL if finetune else "use the same, or finetune=True to start anew"
        raise CheckpointError(f"load_checkpoint={str(source.path)!r} was made with {shown}: {hint}")
    if not finetune and source.step >= run["total_steps"]:
        raise CheckpointError(
            f"load_checkpoint={str(source.path)!r} is at step {source.step} of {run['total_steps']}: nothing is left "
            "to train; use finetune=True to start anew"
        )


def _check_hybrid(source: Source, config: McaModelConfig, where: str) -> None:
    if config.hybrid is None:
        raise CheckpointError(
            f"{where} is of a hybrid, and this run trains a transformer: a hybrid does not go back into one; give the "
            "hybrid's own model directory as model_name_or_path"
        )
    if not isinstance(source.contents, TorchDist):
        raise CheckpointError(f"{where} is of a hybrid as fsdp_dtensor; save it again with --ckpt-format torch_dist")
    saved = source.run.get("hybrid", {}).get("pattern")
    if saved is not None and saved != config.hybrid.pattern:
        raise CheckpointError(f"{where} is of a hybrid of pattern {saved!r}, this run has {config.hybrid.pattern!r}")


def _check_transformer(source: Source, config: McaModelConfig, args: TrainingArguments, where: str) -> None:
    if config.hybrid is None and not args.use_legacy_model:
        raise ConfigError(
            f"hybrid_layer_pattern is missing: {where} is of a transformer; `mcaflow hybrid-pattern --layers "
            f"{config.num_layers}` prints one, and use_legacy_model=True goes on training the transformer"
        )
    if not source.contents.num_layers:
        raise CheckpointError(
            f"{where} has layers of several kinds, or is of no model of Megatron-Core: only transformers whose layers "
            "are all alike become hybrids"
        )
    if config.hybrid is not None:
        check_translatable(config.hybrid.pattern, source.contents.num_layers, has_experts=source.contents.has_experts)
    elif source.contents.num_layers != config.num_layers:
        raise CheckpointError(
            f"{where} has {source.contents.num_layers} layers, and the model {config.num_layers}: {_OWN_MODEL}"
        )


def _check_shapes(source: Source, config: McaModelConfig, where: str) -> None:
    rows, hidden = source.contents.vocabulary
    if hidden != config.hidden_size:
        raise CheckpointError(f"{where} has hidden size {hidden}, and the model {config.hidden_size}: {_OWN_MODEL}")
    vocab_size = source.run.get("vocab_size", config.vocab_size)
    if vocab_size != config.vocab_size or rows < config.vocab_size:
        found = vocab_size if vocab_size != config.vocab_size else rows
        raise CheckpointError(
            f"{where} has a vocabulary of {found}, and the model one of {config.vocab_size}: {_OWN_MODEL}"
        )


_PARTS = {
    "output_layer.weight": "untied",
    ".linear_qkv.bias": "qkv_bias",
    ".linear_proj.bias": "attention_output_bias",
    ".q_layernorm.weight": "qk_layernorm",
    ".mlp.linear_fc1.bias": "mlp_bias",
}
"""End of the name of a weight → property of a config that has it. Megatron reads what a model asks for, and no more."""


def _check_parts(source: Source, config: McaModelConfig, where: str) -> None:
    """A part that the source has trained and the model lacks would be left behind in silence."""
    stored = [key for key in source.contents.stored if not key.startswith("optimizer.")]
    for end, name in _PARTS.items():
        if not getattr(config, name) and (found := [key for key in stored if key.endswith(end)]):
            raise CheckpointError(
                f"{where} has {found[0]}, and the model has none ({name} is false): give the model that it was made "
                "from as model_name_or_path"
            )


def _check_optimizer(source: Source, args: TrainingArguments, where: str) -> None:
    instead, contents = "set no_load_optim=True to take the weights alone", source.contents
    if not contents.has_optimizer:
        raise CheckpointError(f"{where} has no optimizer state: {instead}")
    if not args.use_distributed_optimizer:
        raise CheckpointError(
            f"{where}: this run has use_distributed_optimizer=False, and only the distributed optimizer takes the "
            f"state of another model's; {instead}"
        )
    if not isinstance(contents, TorchDist):
        return
    if contents.has_bucket_states:
        raise CheckpointError(
            f"{where}: its optimizer state lies in the buffers of one layout (dp_reshardable, dp_zero_gather_scatter), "
            "which another model cannot read; save it again as fully_reshardable (Megatron-LM's "
            f"--dist-ckpt-optim-fully-reshardable), or {instead}"
        )
    if not contents.has_distributed_states:
        raise CheckpointError(
            f"{where} was made with use_distributed_optimizer=False, and only the distributed optimizer's state goes "
            f"into another model; {instead}"
        )
