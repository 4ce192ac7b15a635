"""The convert job proves its result: logits of the written checkpoint against transformers."""

from pathlib import Path
from typing import Any

import pytest

from mca_lib.converter import jobs
from mca_lib.errors import ResourceError
from tests.mca_lib.converter import export_ranks, llama_files
from tests.ranks import RankError


@pytest.fixture
def source(ranks: Any, tmp_path: Path) -> Path:
    ranks(1, export_ranks.make_source, tmp_path / "hf", "llama", "float32")
    return tmp_path / "hf"


def test_result_holds_digest_and_logits(ranks: Any, source: Path, tmp_path: Path) -> None:
    (result,) = ranks(1, export_ranks.convert, source, tmp_path / "mca")
    assert result["logits"]["max_difference"] <= 1e-4
    assert abs(result["logits"]["kl_divergence"]) < 1e-6
    assert result["logits"]["top1_agreement"] == 1.0
    assert result["logits"]["tokens"] > 100
    assert result["logits"]["max_logit"] > 1
    assert result["dtype"] == "float32"
    assert set(result["parts"]) == {"weights", "config", "tokenizer", "generation"}
    assert len(result["digest"]) == 64


def test_wrong_weight_table_fails(ranks: Any, source: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"ModelError: .*logits differ from transformers by up to"):
        ranks(1, export_ranks.convert_with_swapped_gate, source, tmp_path / "mca")


def test_parameter_without_a_row_in_the_table_fails(ranks: Any, source: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"weight table of llama has no row for decoder\.final_layernorm\.weight"):
        ranks(1, export_ranks.convert_without_final_norm, source, tmp_path / "mca")


def test_row_of_the_table_without_a_parameter_fails(ranks: Any, source: Path, tmp_path: Path) -> None:
    ranks(1, export_ranks.add_extra_tensor, source)
    with pytest.raises(RankError, match=r"weight table of llama has decoder\.extra\.weight, the model does not"):
        ranks(1, export_ranks.convert_with_a_row_too_many, source, tmp_path / "mca")


def test_nan_fails(ranks: Any, source: Path, tmp_path: Path) -> None:
    ranks(1, export_ranks.poison, source)
    with pytest.raises(RankError, match=rf"ModelError: {source}/model\.safetensors: model\.norm\.weight holds NaN"):
        ranks(1, export_ranks.convert, source, tmp_path / "mca")


def test_limit_is_kept(ranks: Any, source: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"more than checkpoint\.max_logits_difference=1e-12"):
        ranks(1, export_ranks.convert, source, tmp_path / "mca", 1e-12)


def test_mca_checkpoint_is_not_converted_again(ranks: Any, source: Path, tmp_path: Path) -> None:
    ranks(1, export_ranks.convert, source, tmp_path / "mca")
    with pytest.raises(RankError, match="already an MCA checkpoint"):
        ranks(1, export_ranks.convert, tmp_path / "mca", tmp_path / "twice")


@pytest.mark.parametrize("same", [True, False])
def test_stored_head_of_a_tied_model_must_be_the_embedding(ranks: Any, tmp_path: Path, same: bool) -> None:
    ranks(1, export_ranks.make_source, tmp_path / "hf", "llama-tied")
    ranks(1, export_ranks.add_redundant_head, tmp_path / "hf", same)
    if same:
        ranks(1, export_ranks.convert, tmp_path / "hf", tmp_path / "mca")
    else:
        with pytest.raises(RankError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
            ranks(1, export_ranks.convert, tmp_path / "hf", tmp_path / "mca")


def test_model_that_does_not_fit_twice_into_memory_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama_files.make(tmp_path / "hf")
    monkeypatch.setattr(jobs, "available_memory", lambda: 100_000)
    spec = {"model": str(tmp_path / "hf"), "output": str(tmp_path / "mca"), "max_logits_difference": 1e-3}
    with pytest.raises(ResourceError, match=r"set checkpoint\.max_logits_difference: null to convert unchecked"):
        jobs.convert(spec, lambda *args, **metrics: None)
    assert not (tmp_path / "mca").exists()
    assert jobs.convert({**spec, "max_logits_difference": None}, lambda *args, **metrics: None)["logits"] is None


def test_model_whose_logits_are_off_is_not_published(ranks: Any, source: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="more than checkpoint"):
        ranks(1, export_ranks.convert, source, tmp_path / "mca", 1e-12)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
