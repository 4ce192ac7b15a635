"""What users of other converters report, shown absent here. Each test names the report in one line.

Reports that are about logits, configs or layouts are tested where those are.
"""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mca_lib.checkpoint.digest import checkpoint_digest
from mca_lib.checkpoint.reader import CheckpointReader
from mca_lib.converter.export import export_hf
from mca_lib.converter.hf_source import HfSource
from mca_lib.converter.stream import convert_hf
from mca_lib.errors import CheckpointError, ModelError
from tests.mca_lib.converter import export_ranks, killed, llama_files, peer_ranks
from tests.mca_lib.models import factory_ranks

ROOT = Path(__file__).resolve().parents[3]
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def assert_same_weights(a: Path, b: Path) -> None:
    first, second = HfSource(a), HfSource(b)
    assert first.tensors == second.tensors
    for name in first.tensors:
        assert torch.equal(first.slice(name)[:], second.slice(name)[:]), name


def test_tied_model_has_no_output_layer_of_its_own_on_either_side(tmp_path: Path) -> None:
    """slime#345, gpt-neox PR1218, Pai PR593: a tied model's missing lm_head stays random, or stops the conversion."""
    llama_files.make(tmp_path / "hf", tie_word_embeddings=True)
    convert_hf(tmp_path / "hf", tmp_path / "mca")
    assert HEAD not in CheckpointReader(tmp_path / "mca" / "model").stored
    export_hf(tmp_path / "mca", tmp_path / "back")
    assert "lm_head.weight" not in HfSource(tmp_path / "back").tensors
    assert_same_weights(tmp_path / "hf", tmp_path / "back")


def test_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    """slime#345: a target that nothing fills is an error."""
    llama_files.make(tmp_path / "hf", tie_word_embeddings=True)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ModelError, match=r"missing: lm_head\.weight"):
        convert_hf(tmp_path / "hf", tmp_path / "mca")


@pytest.mark.parametrize("layout", [{"pipeline": 4}, {"pipeline": 2, "virtual_pipeline": 2}], ids=str)
def test_only_the_ends_of_a_pipeline_hold_a_tied_embedding(ranks: Any, tmp_path: Path, layout: dict[str, int]) -> None:
    """Megatron-Bridge#954: stages in the middle of a pipeline look for the embedding's group."""
    llama_files.make(tmp_path / "hf", tie_word_embeddings=True, num_hidden_layers=4)
    convert_hf(tmp_path / "hf", tmp_path / "mca")
    for directory in ("hf", "mca"):
        held = ranks(layout["pipeline"], peer_ranks.held_names, layout, tmp_path / directory)
        counts = [names.count(EMBEDDING) for names in held]
        assert counts == [1, *[0] * (layout["pipeline"] - 2), 1]


@pytest.mark.parametrize("tensor", [2, 4])
def test_vocabulary_that_does_not_divide_is_padded_on_load_and_stripped_on_export(
    ranks: Any, tmp_path: Path, tensor: int
) -> None:
    """Megatron-Bridge#1853, PR5353, ColossalAI#6167: an odd vocabulary fails, is padded twice, or stays padded."""
    llama_files.make(tmp_path / "hf", num_key_value_heads=4, vocab_size=101)
    ranks(tensor, factory_ranks.export_at, {"tensor": tensor, "bf16": True}, tmp_path / "hf", tmp_path / "back")
    assert HfSource(tmp_path / "back").tensors["lm_head.weight"].shape == (101, 64)
    assert_same_weights(tmp_path / "hf", tmp_path / "back")


@pytest.mark.parametrize(
    "layout", [{"expert": 2}, {"tensor": 2, "sequence_parallel": True, "expert_tensor": 1}], ids=str
)
def test_experts_of_any_layout_are_exported(ranks: Any, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Megatron-Bridge#3414, ROLL: export of EP without PP, and of ETP other than TP, stops half way."""
    ranks(1, export_ranks.make_source, tmp_path / "hf", "mixtral", "float32")
    ranks(2, factory_ranks.save_at, layout, tmp_path / "hf", tmp_path / "saved")
    streamed = convert_hf(tmp_path / "hf", tmp_path / "mca")
    assert checkpoint_digest(tmp_path / "saved")["digest"] == streamed["digest"]
    export_hf(tmp_path / "saved", tmp_path / "back")
    assert_same_weights(tmp_path / "hf", tmp_path / "back")


def test_plan_is_whole_before_a_weight_is_read(tmp_path: Path) -> None:
    """Megatron-Bridge#1481, #1819: a name that does not fit shows after hours."""
    llama_files.make(tmp_path / "hf", num_hidden_layers=3)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    steps: list[int] = []
    with pytest.raises(ModelError, match=r"missing: model\.layers\.3\..* and 6 more"):
        convert_hf(tmp_path / "hf", tmp_path / "mca", progress=lambda done, total, **_: steps.append(done))
    assert not steps


def test_checkpoint_alone_is_enough_for_an_export(tmp_path: Path) -> None:
    """Megatron-Bridge#698, #2100, #2105, PR911: an export wants the source, the network or a file of the run."""
    llama_files.make(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    shutil.copytree(tmp_path / "hf", tmp_path / "kept")
    convert_hf(tmp_path / "hf", tmp_path / "mca")
    shutil.rmtree(tmp_path / "hf")
    (tmp_path / "mca").rename(tmp_path / "moved")
    export_hf(tmp_path / "moved", tmp_path / "back")
    assert_same_weights(tmp_path / "kept", tmp_path / "back")
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "kept" / name).exists() == (tmp_path / "back" / name).exists()


def test_what_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    """Megatron-Bridge#1514: `FileNotFoundError: run_config.yaml`."""
    with pytest.raises(CheckpointError, match=r"no mca_config\.json; give the directory of an MCA checkpoint"):
        export_hf(tmp_path, tmp_path / "back")


def test_settings_of_training_reach_neither_checkpoint_nor_export(ranks: Any, tmp_path: Path) -> None:
    """Megatron-Bridge#1855: a model that was trained with recomputation is exported with it."""
    llama_files.make(tmp_path / "hf")
    ranks(1, peer_ranks.save_as_trained, tmp_path / "hf", tmp_path / "trained")
    converted = convert_hf(tmp_path / "hf", tmp_path / "mca")
    assert checkpoint_digest(tmp_path / "trained")["digest"] == converted["digest"]


def test_models_of_two_sizes_convert_in_one_process(tmp_path: Path) -> None:
    """ROLL: the fused attention of the second is cut by the sizes of the first."""
    sizes = {"small": {}, "large": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}}
    for name, changes in sizes.items():
        llama_files.make(tmp_path / name / "hf", **changes)
    for name in ("small", "large", "small"):
        shutil.rmtree(tmp_path / name / "back", ignore_errors=True)
        shutil.rmtree(tmp_path / name / "mca", ignore_errors=True)
        convert_hf(tmp_path / name / "hf", tmp_path / name / "mca")
        export_hf(tmp_path / name / "mca", tmp_path / name / "back")
        assert_same_weights(tmp_path / name / "hf", tmp_path / name / "back")


def test_failed_conversion_does_not_spoil_the_next(tmp_path: Path) -> None:
    """ROLL: after an exception the process keeps a class that is patched."""
    llama_files.make(tmp_path / "hf")
    config = (tmp_path / "hf" / "config.json").read_text()
    (tmp_path / "hf" / "config.json").write_text(config.replace('"silu"', '"relu"'))
    with pytest.raises(ModelError, match="hidden_act"):
        convert_hf(tmp_path / "hf", tmp_path / "mca")
    (tmp_path / "hf" / "config.json").write_text(config)
    convert_hf(tmp_path / "hf", tmp_path / "mca")


@pytest.mark.parametrize("size", ["1GB", "0.5MB", "30KB"])
def test_size_of_shards_is_kept_and_the_index_counts(tmp_path: Path, size: str) -> None:
    """ROLL: `max_shard_size="1GB"` is a TypeError, and the index's total_size is 0."""
    total = llama_files.make(tmp_path / "hf")
    convert_hf(tmp_path / "hf", tmp_path / "mca")
    result = export_hf(tmp_path / "mca", tmp_path / "back", max_shard_size=size)
    assert result["bytes"] == total
    index = tmp_path / "back" / "model.safetensors.index.json"
    assert index.exists() == (size == "30KB")
    if index.exists():
        assert json.loads(index.read_text())["metadata"]["total_size"] == total


@pytest.mark.parametrize("step", ["convert", "export"])
def test_killed_run_leaves_nothing_that_looks_whole(tmp_path: Path, step: str) -> None:
    """ROLL: config and tracker are written before the weights, so that a killed save looks complete."""
    llama_files.make(tmp_path / "hf")
    if step == "export":
        convert_hf(tmp_path / "hf", tmp_path / "mca")
    source = tmp_path / ("hf" if step == "convert" else "mca")
    command = [sys.executable, killed.__file__, step, str(source), str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert not (tmp_path / "out").exists()
    (left,) = tmp_path.glob("out-partial-*")
    assert not (left / "mca_config.json").exists()
    assert not (left / "config.json").exists()
    (convert_hf if step == "convert" else export_hf)(source, tmp_path / "out")
