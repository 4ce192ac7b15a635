"""Trainers on Megatron-Core and their arguments. The names load on first use: importing this is light."""

from mca_lib.lazy import loader

_HOME = {
    "DPOTrainer": "mca_lib.trainers.dpo_trainer",
    "McaTrainer": "mca_lib.trainers.trainer",
    "Seq2SeqTrainingArguments": "mca_lib.trainers.training_args",
    "TrainingArguments": "mca_lib.trainers.training_args",
}
__all__ = sorted(_HOME)
__getattr__ = loader(__name__, _HOME)
