"""What a run cannot start from is refused before a model is built, with the reason and what to change."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mca_lib import run_train
from mca_lib.checkpoint.sealed import RECORD_NAME, seal
from mca_lib.checkpoint.source import open_source
from mca_lib.checkpoint.source_checks import check_run, check_source, check_start
from mca_lib.errors import CheckpointError, ConfigError
from mca_lib.models.config import HybridLayers, McaModelConfig
from mca_lib.trainers import Seq2SeqTrainingArguments
from tests.mca_lib.checkpoint import source_training
from tests.mca_lib.checkpoint.source_training import DENSE, EXPERTS, FRESH, MAMBA, OPTIONS, SAVED


def check(directory: Path, source: Path | str | None, **options: Any) -> None:
    """What a run of these options does before it takes memory."""
    load = {} if source is None else {"load_checkpoint": str(source)}
    check_start(directory, Seq2SeqTrainingArguments(output_dir="unused", **load, **options))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*-*-*-*", r"has 4 attention \(\*\) and 3 MLP"),
        ("MMMM", r"has 0 attention \(\*\) and 0 MLP .* so write 4 of both"),
        ("*-*-", "has 2 attention and MLP layers, and the transformer has 4; `mcaflow hybrid-pattern --layers 4`"),
        ("*-*-*-*-/*-", "multi-token prediction .* remove '/\\*-'"),
        ("*-*-*-G*-", "G .gated delta net. cannot start from a transformer"),
        ("*-*-*-D*-", "D .sparse attention .DSA.. cannot start"),
        ("*-*-*-+*-", r"\+ .latent attention. cannot start"),
        ("*-*E*-*E", "mixes dense .-. and MoE .E. layers"),
        (EXPERTS, "the transformer's are dense MLP: write - for E"),
        ("-*-*-*-*", "an MLP comes before the attention of its layer"),
    ],
)
def test_a_pattern_that_does_not_fit_the_transformer(source_folder, transformer, pattern, message):
    for source in (None, transformer.checkpoint):
        with pytest.raises(ConfigError, match=message):
            check(source_folder / "dense", source, hybrid_layer_pattern=pattern)


def test_the_pattern_is_missing(source_folder, transformer):
    with pytest.raises(ConfigError, match=r"hybrid_layer_pattern is missing: .*--layers 4.* use_legacy_model=True"):
        check(source_folder / "dense", transformer.checkpoint)
    check(source_folder / "dense", transformer.checkpoint, use_legacy_model=True)


def test_another_model(source_folder, transformer):
    with pytest.raises(CheckpointError, match="has a vocabulary of 131, and the model one of 99"):
        check_source(open_source(transformer.checkpoint), _config(source_folder, vocab_size=99), _arguments())
    with pytest.raises(CheckpointError, match="has hidden size 32, and the model 64"):
        check_source(open_source(transformer.checkpoint), _config(source_folder, hidden_size=64), _arguments())
    short = _config(source_folder, num_layers=2).with_hybrid(HybridLayers("*-*-"))
    with pytest.raises(ConfigError, match="has 2 attention and MLP layers, and the transformer has 4"):
        check_source(open_source(transformer.checkpoint), short, _arguments())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("output_layer.weight", "untied is false"),
        ("decoder.layers.self_attention.linear_qkv.bias", "qkv_bias is false"),
        ("decoder.layers.self_attention.q_layernorm.weight", "qk_layernorm is false"),
    ],
)
def test_a_part_that_the_model_lacks_is_not_left_behind(source_folder, transformer, name, said):
    source = open_source(transformer.checkpoint)
    check_source(source, _config(source_folder), _arguments())
    source.contents.stored[name] = source.contents.stored["decoder.layers.self_attention.linear_qkv.weight"]
    with pytest.raises(CheckpointError, match=rf"has {name}, and the model has none \({said}\)"):
        check_source(source, _config(source_folder), _arguments())


def test_an_optimizer_that_another_model_cannot_read(ranks, source_folder, transformer, tmp_path):
    options = {**OPTIONS, "use_legacy_model": True, "load_checkpoint": str(transformer.checkpoint)}
    for sharding in ("dp_reshardable", "dp_zero_gather_scatter"):
        out = tmp_path / sharding
        ranks(1, source_training.save_as_megatron_lm, f"{source_folder}/dense", str(out), options, sharding)
        with pytest.raises(CheckpointError, match=r"--dist-ckpt-optim-fully-reshardable.*, or set no_load_optim=True"):
            check(source_folder / "dense", out, hybrid_layer_pattern=DENSE)
        check(source_folder / "dense", out, hybrid_layer_pattern=DENSE, no_load_optim=True)


def test_an_optimizer_that_is_not_distributed(source_folder, transformer):
    options = {"hybrid_layer_pattern": DENSE, "use_distributed_optimizer": False}
    with pytest.raises(CheckpointError, match="this run has use_distributed_optimizer=False"):
        check(source_folder / "dense", transformer.checkpoint, **options)
    check(source_folder / "dense", transformer.checkpoint, no_load_optim=True, **options)


def test_a_hybrid_does_not_go_back(ranks, source_folder, transformer, tmp_path):
    options = {**OPTIONS, **MAMBA, "hybrid_layer_pattern": FRESH, "load_checkpoint": str(transformer.checkpoint)}
    ranks(1, source_training.load_and_save, f"{source_folder}/dense", str(tmp_path), options)
    hybrid = tmp_path / f"checkpoint-{SAVED}"
    with pytest.raises(CheckpointError, match="is of a hybrid, and this run trains a transformer"):
        check(source_folder / "dense", hybrid, use_legacy_model=True)
    _rewrite(hybrid, run={"hybrid": {"pattern": FRESH}})
    with pytest.raises(CheckpointError, match=r"of pattern 'M\*-\*-M\*-\*-', this run has '\*-\*-\*-\*-'"):
        check(source_folder / "dense", hybrid, hybrid_layer_pattern=DENSE)
    check(source_folder / "dense", hybrid, hybrid_layer_pattern=FRESH, **MAMBA)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hybrid_layer_pattern": "*-*-"}, "`mcaflow hybrid-pattern --layers 4` prints a pattern that fits"),
        ({"hybrid_layer_pattern": DENSE, "stage": "dpo"}, "load_checkpoint goes with stage pt or sft"),
        ({"hybrid_layer_pattern": DENSE, "finetuning_type": "lora"}, "load_checkpoint=.* no effect with .*'lora'"),
        (
            {"hybrid_layer_pattern": FRESH, "finetuning_type": "lora", "load_checkpoint": None},
            "fresh ones would be neither trained nor saved",
        ),
    ],
)
def test_a_run_ends_with_status_2_before_ranks_meet(
    source_folder, transformer, tmp_path, monkeypatch, capsys, options, message
):
    arguments = {"model_name_or_path": f"{source_folder}/dense", "token_store": f"{source_folder}/store"}
    arguments |= {"output_dir": f"{tmp_path}/out", "load_checkpoint": str(transformer.checkpoint), **options}
    (tmp_path / "arguments.json").write_text(json.dumps(arguments))
    monkeypatch.setattr(sys, "argv", ["run_train", f"{tmp_path}/arguments.json"])
    monkeypatch.setenv("MCAFLOW_RANK_ERRORS", str(tmp_path))
    assert run_train._run() == 2
    assert re.search(message, capsys.readouterr().err)
    assert not torch.distributed.is_initialized()


def test_settings_that_differ_are_named(transformer):
    source = open_source(transformer.checkpoint)
    run = dict(source.run)
    check_run(source, {**run, "num_layers": 10, "base model": "another", "hybrid": {}}, finetune=False)
    with pytest.raises(
        CheckpointError, match=r"made with seed=5 and not 6, learning_rate=0\.005 and not 0\.1: .*finetune"
    ):
        check_run(source, {**run, "learning_rate": 0.1, "seed": 6}, finetune=False)
    check_run(source, {**run, "learning_rate": 0.1, "seed": 6}, finetune=True)
    with pytest.raises(CheckpointError, match="made with model_type='llama' and not 'qwen3': give the model"):
        check_run(source, {**run, "model_type": "qwen3"}, finetune=True)
    with pytest.raises(CheckpointError, match=f"is at step {SAVED} of {SAVED}: nothing is left to train"):
        check_run(replace(source, run={}), {"total_steps": SAVED}, finetune=False)


def test_what_is_no_checkpoint(source_folder, transformer, tmp_path):
    with pytest.raises(CheckpointError, match="'nowhere' is not a directory"):
        open_source("nowhere")
    with pytest.raises(CheckpointError, match=r"is no checkpoint of a training: .* go to model_name_or_path"):
        open_source(source_folder / "dense")
    with pytest.raises(CheckpointError, match=r"holds several: name one, as '.*checkpoint-5'"):
        open_source(transformer.folder)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    with pytest.raises(CheckpointError, match=r"names iter_0000007, and .* is missing"):
        open_source(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("seven")
    with pytest.raises(CheckpointError, match="holds 'seven', expected an iteration or release"):
        open_source(tmp_path)
    copy = tmp_path / "checkpoint-3"
    shutil.copytree(transformer.checkpoint, copy)
    (copy / "trainer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is damaged: trainer\.json has 2 bytes"):
        open_source(copy)


def test_adapters_alone_are_no_start(transformer, tmp_path):
    shutil.copytree(transformer.checkpoint, tmp_path / "checkpoint-3")
    _rewrite(tmp_path / "checkpoint-3", run={"lora r": 8})
    with pytest.raises(CheckpointError, match="holds adapters alone: merge them"):
        open_source(tmp_path / "checkpoint-3")


def _rewrite(checkpoint: Path, **fields: Any) -> None:
    """Change trainer.json and seal the checkpoint again."""
    path = checkpoint / "trainer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    staging = checkpoint.rename(checkpoint.with_name("staging"))
    (staging / RECORD_NAME).unlink()
    seal(staging, checkpoint, {})


def _arguments() -> Seq2SeqTrainingArguments:
    return Seq2SeqTrainingArguments(output_dir="unused", use_legacy_model=True)


def _config(folder: Path, **fields: Any) -> McaModelConfig:
    return replace(McaModelConfig.from_pretrained(folder / "dense"), **fields)
