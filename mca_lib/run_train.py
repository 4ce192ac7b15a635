"""Train on Megatron-Core, or with `use_mca: false` by LLaMA-Factory, one process per rank:

    python -m torch.distributed.run --standalone --nproc-per-node N -m mca_lib.run_train ARGS.json
    python -m mca_lib.run_train --model_name_or_path DIR --token_store STORE --output_dir OUT

Arguments are those of `mca_lib.trainers` (a JSON or YAML file, or flags). The trained MCA checkpoint is written to
`final_dir`, figures to `output_dir/train_result.json`. Exit status: 0, 2 for a mistake of the user, 143 after SIGTERM
with a checkpoint written, 1 otherwise.
"""

import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mca_lib.data.collator import data_collator_wrapper as data_collator_wrapper
from mca_lib.errors import ConfigError, DataError
from mca_lib.model_download import download_model
from mca_lib.progress import ProgressHandler
from mca_lib.rank_process import as_user_error, die_with_launcher, report_failure
from mca_lib.trainers.arguments import (
    DataArguments,
    FinetuningArguments,
    GeneratingArguments,
    ModelArguments,
    UseMcaArguments,
)

if TYPE_CHECKING:
    from mca_lib.data.indexed_rows import Rows
    from mca_lib.models import VirtualModels
    from mca_lib.trainers.preference import PreferenceArguments
    from mca_lib.trainers.training_args import Seq2SeqTrainingArguments

type Arguments = tuple[
    Seq2SeqTrainingArguments,
    ModelArguments,
    DataArguments,
    FinetuningArguments,
    GeneratingArguments,
    UseMcaArguments,
]


def get_args(argv: Sequence[str] | None = None) -> Arguments:
    """The six argument groups from one JSON or YAML file, or from flags. Unknown names are refused.

    Raises:
        ConfigError: a name is unknown, or a value is impossible.
    """
    from transformers import HfArgumentParser

    from mca_lib.trainers.training_args import Seq2SeqTrainingArguments

    argv = sys.argv[1:] if argv is None else list(argv)
    groups = [
        Seq2SeqTrainingArguments,
        ModelArguments,
        DataArguments,
        FinetuningArguments,
        GeneratingArguments,
        UseMcaArguments,
    ]
    parser = HfArgumentParser(groups)
    try:
        if len(argv) == 1 and argv[0].endswith(".json"):
            parsed = parser.parse_json_file(argv[0])
        elif len(argv) == 1 and argv[0].endswith((".yaml", ".yml")):
            parsed = parser.parse_yaml_file(argv[0])
        else:
            parsed = parser.parse_args_into_dataclasses(argv)
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"{argv[0] if argv else 'arguments'}: {' '.join(str(error).split())}") from None
    return parsed


def setup_lora_training(
    model: "VirtualModels", finetuning_args: FinetuningArguments, seed: int = 42, base_digest: str | None = None
) -> "VirtualModels":
    """Freeze the model and put adapters on it, fp32; collective.

    Args:
        seed: of the adapters' initial values.
        base_digest: digest of the model's weights, which the adapters are bound to.

    Raises:
        ConfigError: the settings are impossible, or name what the model does not have.
    """
    from mca_lib.adapters import apply_megatron_lora, lora_config

    apply_megatron_lora(model, lora_config(finetuning_args), seed)
    model.base_digest = base_digest
    return model


def pt_mca_train(
    training_args: "Seq2SeqTrainingArguments",
    model_args: ModelArguments,
    data_args: DataArguments,
    finetuning_args: FinetuningArguments,
) -> None:
    """Pretraining: every token of a document but its first carries loss, as the token store says."""
    _train(training_args, model_args, data_args, finetuning_args)


def sft_mca_train(
    training_args: "Seq2SeqTrainingArguments",
    model_args: ModelArguments,
    data_args: DataArguments,
    finetuning_args: FinetuningArguments,
) -> None:
    """Supervised fine-tuning: the loss mask of the token store picks the answers."""
    _train(training_args, model_args, data_args, finetuning_args)


def dpo_mca_train(
    training_args: "Seq2SeqTrainingArguments",
    model_args: ModelArguments,
    data_args: DataArguments,
    finetuning_args: FinetuningArguments,
) -> None:
    """Preference optimization on a token store of pairs; the reference is the model that training starts from."""
    _train(training_args, model_args, data_args, finetuning_args)


STAGES = {"pt": pt_mca_train, "sft": sft_mca_train, "dpo": dpo_mca_train}


def mca_train(
    training_args: "Seq2SeqTrainingArguments",
    model_args: ModelArguments,
    data_args: DataArguments,
    finetuning_args: FinetuningArguments,
) -> None:
    """Train on Megatron-Core. What is not supported is refused before anything is loaded."""
    if finetuning_args.stage == "dpo":
        preference_arguments(finetuning_args)
        if training_args.load_checkpoint:
            raise ConfigError("load_checkpoint goes with stage pt or sft: a reference model is that of a whole run")
    if finetuning_args.finetuning_type == "lora":
        from mca_lib.adapters import lora_config

        lora_config(finetuning_args)
        training_args.check_with_adapters()
    STAGES[finetuning_args.stage](training_args, model_args, data_args, finetuning_args)


def llama_factory_train(
    training_args: "Seq2SeqTrainingArguments",
    model_args: ModelArguments,
    data_args: DataArguments,
    finetuning_args: FinetuningArguments,
) -> None:
    """Train with LLaMA-Factory's trainers, on the same rows in the same steps; all ranks are replicas.

    Raises:
        ConfigError: an argument that works on Megatron-Core alone is set.
    """
    from mca_lib.trainers.llama_factory import refuse_megatron_arguments

    preference = preference_arguments(finetuning_args) if finetuning_args.stage == "dpo" else None
    refuse_megatron_arguments(training_args)
    stores = _open_stores(training_args, data_args, finetuning_args)
    source = Path(download_model(model_args.model_name_or_path))
    # Here, because it imports LLaMA-Factory, which takes seconds.
    from mca_lib.trainers.llama_factory import backend

    backend.train(training_args, model_args, finetuning_args, source, *stores, preference)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of every rank. Raises what went wrong, after leaving word for the launcher."""
    die_with_launcher()
    _set_up_logging()
    try:
        training_args, model_args, data_args, finetuning_args, _, use_mca_args = get_args(argv)
        train = mca_train if use_mca_args.use_mca else llama_factory_train
        train(training_args, model_args, data_args, finetuning_args)
    except Exception as error:
        report_failure(error)
        raise


def _train(
    training_args: "Seq2SeqTrainingArguments",
    model_args: ModelArguments,
    data_args: DataArguments,
    finetuning_args: FinetuningArguments,
) -> None:
    from mca_lib.checkpoint.source_checks import check_start
    from mca_lib.parallel import destroy_model_parallel, initialize_model_parallel

    train_rows, eval_rows = _open_stores(training_args, data_args, finetuning_args)
    directory = download_model(model_args.model_name_or_path)
    check_start(directory, training_args, lora=finetuning_args.finetuning_type == "lora")
    initialize_model_parallel(training_args, training_args.seed)

    from mca_lib.checkpoint.base import base_digest
    from mca_lib.models import AutoModel
    from mca_lib.models.training_rules import check_adapters_alone
    from mca_lib.models.vision.freeze import frozen_modules
    from mca_lib.trainers import DPOTrainer, McaTrainer

    model = AutoModel.from_pretrained(directory, training_args)
    model.base_digest = model_args.weights_digest or base_digest(directory)
    if finetuning_args.finetuning_type == "lora":
        check_adapters_alone(model.mca_config, training_args)
        setup_lora_training(model, finetuning_args, training_args.seed, model.base_digest)
    else:
        training_args.freeze = frozen_modules(model.mca_config, training_args)
    if finetuning_args.stage == "dpo":
        DPOTrainer(model, training_args, train_rows, eval_rows, preference_arguments(finetuning_args)).train()
    else:
        McaTrainer(model, training_args, train_rows, eval_rows).train()
    destroy_model_parallel()


def _open_stores(
    training_args: "Seq2SeqTrainingArguments", data_args: DataArguments, finetuning_args: FinetuningArguments
) -> "tuple[Rows, Rows | None]":
    """The splits train and eval. Raises ConfigError or DataError for what cannot be trained on."""
    from mca_lib.data.indexed_rows import open_split

    if data_args.token_store is None:
        raise ConfigError("token_store is missing: give the directory that holds the splits train and eval")
    splits = {name: Path(data_args.token_store) / name for name in ("train", "eval")}
    if not splits["train"].is_dir():
        raise DataError(f"token_store={data_args.token_store!r} has no split 'train'")
    _check_objective(Path(data_args.token_store), finetuning_args.stage)
    training_args.batch_shape(training_args.world_size)
    has_eval = splits["eval"].is_dir() and training_args.do_eval
    train_rows, eval_rows = open_split(splits["train"]), open_split(splits["eval"]) if has_eval else None
    train_rows.digest = data_args.train_digest
    if eval_rows is not None:
        eval_rows.digest = data_args.eval_digest
    return train_rows, eval_rows


def preference_arguments(finetuning_args: FinetuningArguments) -> "PreferenceArguments":
    """The loss that the arguments ask for. Raises ConfigError for values that contradict each other."""
    from mca_lib.trainers.preference import PreferenceArguments

    names = ("pref_loss", "pref_beta", "dpo_label_smoothing", "simpo_gamma", "pref_ftx")
    preference = PreferenceArguments(**{name: getattr(finetuning_args, name) for name in names})
    if finetuning_args.use_ref_model not in (None, preference.needs_reference):
        needs = "needs a" if preference.needs_reference else "has no"
        raise ConfigError(
            f"use_ref_model={finetuning_args.use_ref_model}, but pref_loss={preference.pref_loss!r} {needs} "
            "reference model: leave it out"
        )
    return preference


def _check_objective(token_store: Path, stage: str) -> None:
    """Pairs of answers are for preference optimization alone. A store without meta.json was made by other means."""
    meta = token_store / "meta.json"
    objective = json.loads(meta.read_text(encoding="utf-8"))["objective"] if meta.is_file() else stage
    if (objective == "dpo") != (stage == "dpo"):
        raise DataError(f"token_store={str(token_store)!r} was made for stage {objective!r}, not {stage!r}")


def _set_up_logging() -> None:
    """Warnings of all, and on rank 0 what this package says, to stderr and to the parent."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Megatron and torch's checkpoints warn of absent GPU libraries and of deprecations of their own, on every rank.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(megatron|torch\.distributed\.checkpoint)\.")
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("mca_lib").setLevel(logging.INFO)
        logging.getLogger("mca_lib").addHandler(ProgressHandler())


def _run() -> int:
    """`main` with an exit status; torchrun's summary gets the traceback of a defect through `record`."""
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        record(main)()
    except Exception as error:
        user = as_user_error(error)
        if user is None:
            raise
        if os.environ.get("RANK", "0") == "0":
            print(user, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(_run())
