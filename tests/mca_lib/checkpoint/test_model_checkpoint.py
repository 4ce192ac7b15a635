"""Checkpoints and their digest: independent of the layout, and damage is found."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mca_lib.checkpoint.digest import checkpoint_digest
from mca_lib.checkpoint.reader import CheckpointReader
from mca_lib.checkpoint.verify import expected_shapes, verify_model
from mca_lib.errors import CheckpointError
from mca_lib.models.config import McaModelConfig
from tests.mca_lib.converter import export_ranks
from tests.mca_lib.models import factory_ranks
from tests.ranks import RankError


@pytest.fixture(scope="module")
def source(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "hf"
    ranks(1, export_ranks.make_source, directory, "qwen2-tied", "float32")
    return directory


@pytest.fixture(scope="module")
def saved(ranks: Any, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "mca"
    ranks(1, factory_ranks.save_at, {}, source, directory)
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "mca"))


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, {}), (2, {"tensor": 2}), (2, {"pipeline": 2, "virtual_pipeline": 2}), (4, {"tensor": 4})],
)
def test_digest_does_not_depend_on_the_layout(
    ranks: Any, source: Path, saved: Path, tmp_path: Path, world_size: int, layout: dict[str, Any]
) -> None:
    ranks(world_size, factory_ranks.save_at, layout, source, tmp_path / "mca")
    assert checkpoint_digest(tmp_path / "mca") == checkpoint_digest(saved)
    stored = CheckpointReader(tmp_path / "mca" / "model").stored
    assert stored["embedding.word_embeddings.weight"].size[0] == 99  # no padding on disk


def test_digest_parts_tell_what_changed(copy: Path, saved: Path) -> None:
    before = checkpoint_digest(saved)
    (copy / "chat_template.jinja").write_text("{{ other }}")
    after = checkpoint_digest(copy)
    assert after["digest"] != before["digest"]
    assert {k for k, v in after["parts"].items() if v != before["parts"][k]} == {"tokenizer"}


def test_digest_sees_one_changed_weight(ranks: Any, source: Path, saved: Path, tmp_path: Path) -> None:
    changed = tmp_path / "hf"
    shutil.copytree(source, changed)
    from safetensors.torch import load_file, save_file

    tensors = load_file(changed / "model.safetensors")
    bits = tensors["model.layers.2.mlp.up_proj.weight"].view(torch.int32)
    bits[3, 5] ^= 1
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    ranks(1, factory_ranks.save_at, {}, changed, tmp_path / "mca")
    before, after = checkpoint_digest(saved)["parts"], checkpoint_digest(tmp_path / "mca")["parts"]
    assert {k for k, v in after.items() if v != before[k]} == {"weights"}


def test_reader_gives_whole_tensors_of_a_sharded_checkpoint(ranks: Any, source: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    ranks(2, factory_ranks.save_at, {"tensor": 2}, source, tmp_path / "mca")
    reader = CheckpointReader(tmp_path / "mca" / "model")
    tensors = load_file(source / "model.safetensors")
    down = reader.read("decoder.layers.3.mlp.linear_fc2.weight")
    assert torch.equal(down, tensors["model.layers.3.mlp.down_proj.weight"])
    gate_and_up = [tensors[f"model.layers.1.mlp.{n}_proj.weight"] for n in ("gate", "up")]
    assert torch.equal(reader.read("decoder.layers.1.mlp.linear_fc1.weight"), torch.cat(gate_and_up))
    embedding = reader.read("embedding.word_embeddings.weight")
    assert torch.equal(embedding, tensors["model.embed_tokens.weight"])


def test_listed_tensors_are_those_of_the_config(saved: Path) -> None:
    config = McaModelConfig.from_pretrained(saved)
    names = {t.name for t in CheckpointReader(saved / "model")}
    assert len(names) == 2 + 7 * config.num_layers
    assert expected_shapes(config).keys() == CheckpointReader(saved / "model").stored.keys()


def test_unknown_tensor_is_named(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor decoder\.layers\.0\.moe"):
        CheckpointReader(saved / "model").read("decoder.layers.0.moe")


@pytest.mark.parametrize("file", ["metadata.json", ".metadata", "__0_0.distcp"])
def test_missing_file_is_found(copy: Path, file: str) -> None:
    (copy / "model" / file).unlink()
    with pytest.raises(CheckpointError, match=r"metadata|__0_0\.distcp: damaged checkpoint: the file is missing"):
        CheckpointReader(copy / "model")


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_truncated_file_is_found(copy: Path, file: str) -> None:
    path = copy / "model" / file
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match=r"unreadable metadata|has \d+ bytes of \d+"):
        CheckpointReader(copy / "model")


def test_garbage_in_a_file_is_an_error_that_names_the_checkpoint(ranks: Any, copy: Path) -> None:
    path = copy / "model" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[: len(data) // 2] = b"\xff" * (len(data) // 2)
    path.write_bytes(data)
    with pytest.raises(RankError, match=r"CheckpointError: .*cannot be read"):
        ranks(1, factory_ranks.parameters_at, {}, copy)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint_digest(copy)


def test_failure_to_write_is_an_error(tmp_path: Path, ranks: Any, source: Path) -> None:
    with pytest.raises(RankError, match=r"CheckpointError: .*cannot be written"):
        ranks(1, factory_ranks.save_with_a_file_size_limit, source, tmp_path / "mca")


def test_checkpoint_of_another_model_is_refused(saved: Path) -> None:
    config = dataclasses.replace(McaModelConfig.from_pretrained(saved), ffn_hidden_size=64, qkv_bias=False)
    with pytest.raises(CheckpointError, match=r"linear_qkv\.bias is not part of the model") as error:
        verify_model(saved / "model", config)
    assert "decoder.layers.mlp.linear_fc2.weight has shape [4, 32, 48], expected [4, 32, 64]" in str(error.value)


def test_vocabulary_of_another_size_is_not_padded_over(ranks: Any, copy: Path) -> None:
    """Megatron would accept it: it allows the embedding to differ, for the sake of padding."""
    config = McaModelConfig.from_pretrained(copy)
    dataclasses.replace(config, vocab_size=120).save_pretrained(copy)
    with pytest.raises(RankError, match=r"CheckpointError: .*word_embeddings.weight has shape \[99, 32\]"):
        ranks(1, factory_ranks.parameters_at, {}, copy)


def test_directory_without_config_is_no_checkpoint(copy: Path) -> None:
    (copy / "mca_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no mca_config\.json"):
        checkpoint_digest(copy)
