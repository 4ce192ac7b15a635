"""A transformer's directory becomes a hybrid's checkpoint, and an export leads back to Hugging Face."""

import json
from pathlib import Path
from typing import Any

import pytest

from mca_lib.checkpoint.digest import checkpoint_digest
from mca_lib.checkpoint.reader import CheckpointReader
from mca_lib.converter.export import export_hf
from mca_lib.converter.hf_source import HfSource
from mca_lib.converter.stream import convert_hf
from mca_lib.converter.translation import Translation
from mca_lib.errors import ConfigError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.hybrid.fresh import fresh_tensors
from mca_lib.models.hybrid.sizes import hybrid_layers
from tests.mca_lib.converter import hybrid_ranks, llama_files
from tests.ranks import RankError

LIMIT = 3e-5
"""Of logits of about 5 in fp32."""


def translated(source: Path, target: Path, pattern: str, **options: Any) -> dict[str, Any]:
    layers = hybrid_layers(pattern, McaModelConfig.from_pretrained(source).hidden_size, hybrid_ranks.MAMBA)
    return convert_hf(source, target, translation=Translation(layers, **options))


def tensors(directory: Path) -> dict[str, tuple[Any, bytes]]:
    """Name → header and bytes of every tensor."""
    with HfSource(directory) as source:
        return {n: (info, source.slice(n)[:].float().numpy().tobytes()) for n, info in source.tensors.items()}


@pytest.mark.parametrize(
    ("variant", "pattern", "fresh_layers"),
    [
        ("llama-tied", "M*-*-M*-*-", "random"),
        ("qwen3-moe", "M*EM*E*E*E", "zero_output"),
        ("mixtral", "*E*E*E*E", "random"),
    ],
)
def test_a_hybrid_has_the_logits_of_its_transformer_and_its_export_those_of_the_hybrid(
    ranks: Any, tmp_path: Path, variant: str, pattern: str, fresh_layers: str
) -> None:
    """With the fresh layers silent; then, with layers that add something, Megatron's against the exported code's."""
    (result,) = ranks(1, hybrid_ranks.make_and_translate, tmp_path, variant, pattern, fresh_layers)
    assert result["logits"]["max_difference"] <= LIMIT
    assert result["logits"]["max_logit"] > 1
    assert result["fresh_layers"] == [i for i, symbol in enumerate(pattern) if symbol == "M"]
    checkpoint = tmp_path / "mca"
    if result["fresh_layers"]:
        ranks(1, hybrid_ranks.move_mamba, checkpoint, tmp_path / "moved")
        checkpoint = tmp_path / "moved"
    ((difference, largest),) = ranks(1, hybrid_ranks.exported_and_difference, checkpoint, tmp_path / "export")
    assert difference <= LIMIT
    assert largest > 1
    if variant == "llama-tied":
        (again,) = ranks(1, hybrid_ranks.convert, tmp_path / "export", tmp_path / "again")
        assert again["logits"]["max_difference"] <= LIMIT, "Mamba layers count where they are the source's own"
    if "M" not in pattern:
        assert tensors(tmp_path / "export") == tensors(tmp_path / "hf")
        config = json.loads((tmp_path / "export" / "config.json").read_text())
        assert config["model_type"] == variant


def test_a_transformer_whose_weights_are_read_otherwise_fails(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"ModelError: .*logits differ from transformers by up to"):
        ranks(1, hybrid_ranks.translate_with_swapped_layers, tmp_path)


def test_two_translations_write_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    llama_files.make(tmp_path / "hf")
    same, again = (translated(tmp_path / "hf", tmp_path / name, "M*-*-*-M") for name in "ab")
    assert same == again
    assert checkpoint_digest(tmp_path / "a")["digest"] == same["digest"]
    other = translated(tmp_path / "hf", tmp_path / "c", "M*-*-*-M", seed=1)
    assert other["parts"]["weights"] != same["parts"]["weights"]
    first, second = (CheckpointReader(tmp_path / name / "model") for name in "ac")
    changed = {t.name for t in first if not first.read(t.name).equal(second.read(t.name))}
    drawn = ("in_proj.weight.", "conv1d.", "A_log", "dt_bias", "out_proj.weight")
    assert changed == {t.name for t in first if t.name.partition(".mixer.")[2].startswith(drawn)}


def test_fresh_layers_are_those_of_the_seed_in_the_dtype_of_the_source(tmp_path: Path) -> None:
    llama_files.make(tmp_path / "hf")
    translated(tmp_path / "hf", tmp_path / "mca", "*-*-M*-", seed=7)
    config = McaModelConfig.from_pretrained(tmp_path / "mca")
    reader = CheckpointReader(tmp_path / "mca" / "model")
    for name, whole in fresh_tensors(config, 4, 7):
        parts = {t.name: t for t in reader if t.name == name or t.name.startswith(name + ".")}
        order = [name + suffix for suffix in (".z", ".x", ".B", ".C", ".dt")] if "in_proj.weight" in name else [*parts]
        order = [name + suffix for suffix in (".x", ".B", ".C")] if "conv1d" in name else order
        kept = name.endswith(("A_log", ".D", "dt_bias"))
        rows = 0
        for part in order:
            stored = reader.read(part)
            assert str(stored.dtype) == ("torch.float32" if kept else "torch.bfloat16")
            assert stored.equal(whole[rows : rows + len(stored)].to(stored.dtype))
            rows += len(stored)
        assert rows == len(whole)


def test_an_exported_hybrid_is_read_again_and_exported_the_same(tmp_path: Path) -> None:
    llama_files.make(tmp_path / "hf")
    first = translated(tmp_path / "hf", tmp_path / "mca", "M*-*-*-M")
    export_hf(tmp_path / "mca", tmp_path / "export")
    again = convert_hf(tmp_path / "export", tmp_path / "again")
    assert again["parts"]["weights"] == first["parts"]["weights"]
    export_hf(tmp_path / "again", tmp_path / "twice")
    assert tensors(tmp_path / "twice") == tensors(tmp_path / "export")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("export", "twice")]
    assert configs[0] == configs[1]


def test_a_pattern_without_mamba_leads_back_to_the_source(tmp_path: Path) -> None:
    llama_files.make(tmp_path / "hf")
    translated(tmp_path / "hf", tmp_path / "mca", "*-*-*-")
    export_hf(tmp_path / "mca", tmp_path / "export")
    assert tensors(tmp_path / "export") == tensors(tmp_path / "hf")


def test_a_pattern_that_does_not_fit_is_refused_by_its_name_before_anything_is_written(tmp_path: Path) -> None:
    llama_files.make(tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"^checkpoint\.pattern='M\*-\*-' has 2 attention and MLP layers"):
        translated(tmp_path / "hf", tmp_path / "mca", "M*-*-", field="checkpoint.pattern")
    assert not (tmp_path / "mca").exists()
