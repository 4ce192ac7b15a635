"""Arguments: what is honoured works, what is not is refused, and nothing is ignored in silence."""

import dataclasses
from typing import Any

import pytest
import transformers

from mca_lib.errors import ConfigError
from mca_lib.trainers.evaluation import evaluation_shape
from mca_lib.trainers.training_args import HARMLESS, HONOURED, Seq2SeqTrainingArguments, TrainingArguments


def test_the_tables_name_fields_of_transformers():
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert names >= HONOURED | HARMLESS


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing_factor": 0.1},
        {"neftune_noise_alpha": 5.0},
        {"gradient_checkpointing": True},
        {"deepspeed": "ds.json"},
        {"optim": "adafactor"},
        {"fp16_full_eval": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_field_without_effect_is_refused(options):
    with pytest.raises(ConfigError, match=rf"^{next(iter(options))}=.* has no effect"):
        TrainingArguments(output_dir="out", **options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type='polynomial'"),
        ({"lr_scheduler_type": "nonsense"}, "nonsense"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"save_strategy": "best", "metric_for_best_model": None}, "save_strategy='best'"),
        ({"recompute_granularity": "some"}, "recompute_granularity='some'"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"overlap_param_gather": True}, "needs overlap_grad_reduce"),
        ({"optimizer_offload_fraction": 1.5}, r"optimizer_offload_fraction=1\.5"),
        ({"optimizer_offload_fraction": 0.5}, "sees no GPU"),
        ({"optimizer_offload_fraction": 0.5, "preflight": True}, "set preflight=False"),
        ({"fp8": "hybrid", "bf16": True}, "fp8='hybrid' needs a GPU"),
        ({"fp8": "hybrid"}, "fp8='hybrid' needs bf16"),
        ({"fp8": "e5m2", "bf16": True}, "fp8='e5m2'"),
        ({"decay_style": "square"}, "decay_style='square'"),
        ({"decay_ratio": 0.0}, r"decay_ratio=0\.0"),
        ({"fp16": True, "bf16": True}, "fp16 and bf16"),
        ({"fp16": True, "expert_model_parallel_size": 2}, "fp16=True with expert_model_parallel_size=2"),
        ({"logging_steps": 0.5}, r"logging_steps=0\.5"),
        ({"num_train_epochs": -1.0}, r"num_train_epochs=-1\.0: use a finite number above 0"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end=True needs evaluations"),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch", "metric_for_best_model": "f1"}, "the best model"),
    ],
)
def test_an_impossible_value_is_a_config_error_of_one_line(options, named):
    with pytest.raises(ConfigError, match=named) as caught:
        TrainingArguments(output_dir="out", **options)
    assert "\n" not in str(caught.value)


def test_bf16_needs_no_gpu():
    import torch

    args = Seq2SeqTrainingArguments(output_dir="out", bf16=True)
    assert args.params_dtype is torch.bfloat16
    assert args.device.type in ("cpu", "cuda")


@pytest.mark.parametrize(
    ("options", "world_size", "expected"),
    [
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}, 2, (12, 2, 2)),
        ({"global_batch_size": 16, "per_device_train_batch_size": 2}, 2, (16, 2, 2)),
        ({"global_batch_size": 4, "per_device_train_batch_size": 1, "tensor_model_parallel_size": 2}, 4, (4, 1, 2)),
    ],
)
def test_the_batch_follows_from_transformers_names_or_from_the_global_size(options, world_size, expected):
    shape = TrainingArguments(output_dir="out", **options).batch_shape(world_size)
    assert (shape.global_batch_size, shape.micro_batch_size, shape.data_parallel_size) == expected


@pytest.mark.parametrize(("options", "rows"), [({}, 2), ({"per_device_eval_batch_size": 3}, 3)])
def test_an_evaluation_takes_as_many_rows_at_once_as_training_unless_told(options, rows):
    args = TrainingArguments(output_dir="out", per_device_train_batch_size=2, **options)
    assert evaluation_shape(args, args.batch_shape(1)).micro_batch_size == rows


@pytest.mark.parametrize(
    ("options", "due"),
    [
        ({"save_strategy": "steps", "save_steps": 2}, [2, 4, 6]),
        ({"save_strategy": "epoch"}, [3, 6]),
        ({"save_strategy": "no"}, []),
        ({"save_strategy": "steps", "save_steps": 0}, []),
    ],
)
def test_checkpoints_are_due_by_steps_or_epochs(options: dict[str, Any], due: list[int]):
    args = TrainingArguments(output_dir="out", **options)
    assert [step for step in range(1, 7) if args.saves_at(step, steps_per_epoch=3)] == due
