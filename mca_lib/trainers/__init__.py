"""Trainers on Megatron-Core and their arguments. The names load on first use: importing this is light."""

import importlib

_HOME = {
    "DPOTrainer": "mca_lib.trainers.dpo_trainer",
    "McaTrainer": "mca_lib.trainers.trainer",
    "Seq2SeqTrainingArguments": "mca_lib.trainers.training_args",
    "TrainingArguments": "mca_lib.trainers.training_args",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
