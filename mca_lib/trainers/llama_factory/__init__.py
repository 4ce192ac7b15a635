"""The second backend, `use_mca: false`: LLaMA-Factory's own trainers on the same rows, schedule and seed.

files.py     what they start from (a Hugging Face directory, an adapter), and what their result becomes
rows.py      the token store as their data set: the micro batches of the whole run, in order
record.py    log, checkpoints and SIGTERM, as a callback of transformers' Trainer
backend.py   the trainers themselves; nothing else here imports LLaMA-Factory
"""

from dataclasses import fields
from typing import TYPE_CHECKING

from mca_lib.errors import ConfigError
from mca_lib.models.config_parts import LongRope

if TYPE_CHECKING:
    from mca_lib.models.config import McaModelConfig
    from mca_lib.trainers.training_args import TrainingArguments

# Fields of `MegatronArguments` that mean the same here, and those whose effect is speed or a safety of its own.
HONOURED = frozenset({"global_batch_size", "min_learning_rate", "decay_ratio", "decay_style", "final_dir",
                      "save_keep_every", "recompute_granularity"})  # fmt: skip
WITHOUT_EFFECT = frozenset({"use_distributed_optimizer", "async_save", "preflight"})


def refuse_megatron_arguments(args: "TrainingArguments") -> None:
    """Raise ConfigError for an argument that works on Megatron-Core alone and is set."""
    from mca_lib.trainers.training_args import MegatronArguments

    for spec in fields(MegatronArguments):
        value, default = getattr(args, spec.name), spec.default
        if spec.name in HONOURED | WITHOUT_EFFECT or value == default or not value:
            continue
        raise ConfigError(f"{spec.name}={value!r} has no effect with use_mca=false: leave it out, or use use_mca=true")
    if args.recompute_granularity == "selective":
        raise ConfigError("recompute_granularity='selective' is Megatron-Core's alone: use none or full")
    if args.load_best_model_at_end:
        raise ConfigError("load_best_model_at_end goes with use_mca=true alone")


def check_model(config: "McaModelConfig", *, adapters: bool) -> None:
    """Raise ConfigError for a model that transformers' classes cannot train without losing a part of it."""
    if config.hybrid is not None:
        raise ConfigError("training.use_mca: LLaMA-Factory's trainers have no hybrid models; use true")
    if config.vision is not None:
        raise ConfigError("training.use_mca: models that see images are trained on Megatron-Core alone; use true")
    if config.linear_attention_layers:
        # Their state goes on from one document of a row to the next, whatever the position ids say.
        raise ConfigError(
            "training.use_mca: the gated delta nets of transformers do not tell the documents of a row apart; use true"
        )
    if config.attention_sinks:
        # Its `configure_attn_implementation` (0.9.5) fetches one, and by a name that transformers 5 no longer has.
        raise ConfigError(
            "training.use_mca: LLaMA-Factory has attention with sinks by a kernel from a hub alone; use true"
        )
    if config.mtp_num_layers:
        raise ConfigError(
            "training.use_mca: LLaMA-Factory's trainers drop the multi-token prediction layers of this model; use true"
        )
    if adapters and config.moe is not None:
        raise ConfigError(
            "training.use_mca: adapters on a model with experts are trained on Megatron-Core alone; use true"
        )


def check_longest(config: "McaModelConfig", longest: int) -> None:
    """Raise ConfigError for documents of up to `longest` tokens that transformers would not rotate as if alone."""
    rope = config.rope_scaling
    if isinstance(rope, LongRope) and longest > rope.original_max_position_embeddings:
        raise ConfigError(
            "training.use_mca: transformers rotates all documents of a micro batch as its longest (LongRoPE); use "
            f"dataset.cutoff_len of at most {rope.original_max_position_embeddings} instead of {longest}, or true"
        )
