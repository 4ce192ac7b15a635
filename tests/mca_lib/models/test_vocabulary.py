"""A longer tokenizer grows the vocabulary once, to the same rows on every rank and at every layout."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.mca_lib.converter import export_ranks
from tests.mca_lib.models import vocabulary_ranks
from tests.mca_lib.models.vocabulary_ranks import NEW, OLD
from tests.mca_lib.tiny_models import save_hf
from tests.ranks import RankError

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "two replicas": (2, {}),
    "TP2": (2, {"tensor": 2}),
    "TP4": (4, {"tensor": 4}),
    "PP2": (2, {"pipeline": 2}),
    "PP3": (3, {"pipeline": 3, "last_stage_layers": 2}),
    "PP2 with two chunks each": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "TP2 PP2": (4, {"tensor": 2, "pipeline": 2}),
}


@pytest.fixture(scope="module")
def sources(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`hf/untied`, `hf/tied` (bfloat16), and the same as MCA checkpoints below `mca`."""
    directory = tmp_path_factory.mktemp("sources")
    ranks(1, save_hf, directory / "hf" / "untied", "llama")
    ranks(1, save_hf, directory / "hf" / "tied", "qwen2-tied", "bfloat16")
    for name in ("untied", "tied"):
        ranks(1, "mca_lib.converter.stream:convert_hf", directory / "hf" / name, directory / "mca" / name)
    return directory


def whole(reports: list[Any]) -> dict[str, np.ndarray]:
    """Tensors put together from the ranks' shares; every rank that has a share must have the same."""
    shares: dict[str, dict[int, np.ndarray]] = {}
    for tensor_rank, _, _, rows in reports:
        for name, value in rows.items():
            known = shares.setdefault(name, {}).setdefault(tensor_rank, value)
            assert np.array_equal(known, value), f"ranks differ in {name}"
    return {name: np.concatenate([parts[rank] for rank in sorted(parts)])[:NEW] for name, parts in shares.items()}


@pytest.mark.parametrize("fmt", ["hf", "mca"])
@pytest.mark.parametrize("model", ["untied", "tied"])
def test_rows_are_the_same_at_every_layout_and_from_either_format(
    ranks: Any, sources: Path, model: str, fmt: str
) -> None:
    expected = whole(ranks(1, vocabulary_ranks.grown, {}, sources / "hf" / model, NEW))
    assert set(expected) == ({EMBEDDING, HEAD} if model == "untied" else {EMBEDDING})
    for name, (world_size, layout) in LAYOUTS.items():
        reports = ranks(world_size, vocabulary_ranks.grown, layout, sources / fmt / model, NEW)
        assert all(size == hf["vocab_size"] == NEW for _, size, hf, _ in reports), name
        found = whole(reports)
        assert found.keys() == expected.keys(), name
        for tensor, rows in expected.items():
            assert np.array_equal(found[tensor], rows), (name, tensor)


def test_new_rows_are_near_the_mean_and_all_different(ranks: Any, sources: Path) -> None:
    tensors = whole(ranks(1, vocabulary_ranks.grown, {}, sources / "hf" / "untied", NEW))
    for rows in tensors.values():
        old, new = rows[:OLD], rows[OLD:]
        mean, deviation = old.mean(0), old.std(0)
        distance = np.abs(new - mean) / deviation
        assert 0 < distance.max() < 0.06
        assert 0.008 < (distance**2).mean() ** 0.5 < 0.012
        assert len({row.tobytes() for row in new}) == NEW - OLD


def test_new_rows_of_the_output_layer_are_not_those_of_the_embedding(ranks: Any, sources: Path) -> None:
    for layout in ({"pipeline": 2}, {"pipeline": 3, "last_stage_layers": 2}):
        tensors = whole(ranks(layout["pipeline"], vocabulary_ranks.grown, layout, sources / "hf" / "untied", NEW))
        assert np.abs(tensors[EMBEDDING][OLD:] - tensors[HEAD][OLD:]).min(axis=1).max() > 0
        assert not (tensors[EMBEDDING][OLD:] == tensors[HEAD][OLD:]).all(axis=1).any()


def test_old_rows_stay(ranks: Any, sources: Path) -> None:
    before = whole(ranks(1, vocabulary_ranks.grown, {}, sources / "hf" / "untied", OLD))
    after = whole(ranks(1, vocabulary_ranks.grown, {}, sources / "hf" / "untied", NEW))
    for name in (EMBEDDING, HEAD):
        assert np.array_equal(after[name][:OLD], before[name])


def test_row_does_not_depend_on_how_many_are_added(ranks: Any, sources: Path) -> None:
    few = whole(ranks(1, vocabulary_ranks.grown, {}, sources / "hf" / "untied", OLD + 1))
    many = whole(ranks(1, vocabulary_ranks.grown, {}, sources / "hf" / "untied", NEW))
    assert np.array_equal(few[HEAD], many[HEAD][: OLD + 1])


def test_shorter_tokenizer_changes_nothing(ranks: Any, sources: Path) -> None:
    ((_, size, hf, rows),) = ranks(1, vocabulary_ranks.grown, {}, sources / "hf" / "untied", 50)
    assert size == hf["vocab_size"] == len(rows[EMBEDDING]) == OLD


def test_tied_weights_stay_one(ranks: Any, sources: Path) -> None:
    assert ranks(1, vocabulary_ranks.tied_weights_are_one, sources / "hf" / "tied") == [True]


@pytest.mark.parametrize("model", ["untied", "tied"])
def test_grown_model_is_saved_and_exported_with_its_rows(ranks: Any, sources: Path, model: str, tmp_path: Path) -> None:
    expected = whole(ranks(1, vocabulary_ranks.grown, {}, sources / "hf" / model, NEW))
    ranks(2, vocabulary_ranks.save_grown, {"tensor": 2}, sources / "hf" / model, NEW, tmp_path / "mca")
    ranks(2, vocabulary_ranks.export_grown, {"pipeline": 2}, sources / "mca" / model, NEW, tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == NEW
    for directory in (tmp_path / "mca", tmp_path / "hf"):
        again = whole(ranks(1, vocabulary_ranks.grown, {}, directory, NEW))
        assert all(np.array_equal(again[name], rows) for name, rows in expected.items())
    assert ranks(1, transformers_vocabulary, tmp_path / "hf") == [(NEW, NEW)]


@pytest.mark.parametrize("layout", [{}, {"tensor": 2, "sequence_parallel": True}, {"pipeline": 2}], ids=str)
@pytest.mark.parametrize("variant", ["llama-tied", "deepseek-mtp"])
def test_tensors_that_the_source_stores_twice_grow_together(
    ranks: Any, tmp_path: Path, variant: str, layout: dict[str, Any]
) -> None:
    ranks(1, save_hf, tmp_path / "hf", variant)
    if variant == "llama-tied":
        ranks(1, export_ranks.add_redundant_head, tmp_path / "hf", True)
    count = 1 if layout == {} else 2
    ranks(count, vocabulary_ranks.export_grown, layout, tmp_path / "hf", NEW, tmp_path / "grown")
    (copies,) = ranks(1, vocabulary_ranks.stored_copies, tmp_path / "hf", tmp_path / "grown")
    assert copies
    assert all((same, rows) == (True, NEW) for _, same, rows in copies.values()), copies


def transformers_vocabulary(directory: Path) -> tuple[int, int]:
    """Rows of the embedding and of the output layer, as transformers loads them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    return len(model.get_input_embeddings().weight), len(model.get_output_embeddings().weight)


@pytest.mark.parametrize("variant", ["llama", "llama-tied"])
def test_convert_job_adds_the_same_rows_once_and_checks_the_old_logits(
    ranks: Any, variant: str, tmp_path: Path
) -> None:
    (size,) = ranks(1, vocabulary_ranks.make_source, tmp_path / "hf", variant)
    assert size > OLD
    (result,) = ranks(1, vocabulary_ranks.convert, tmp_path / "hf", tmp_path / "mca", True)
    assert result["logits"]["max_difference"] < 1e-4
    assert json.loads((tmp_path / "mca" / "mca_config.json").read_text())["vocab_size"] == size
    # Loaded with the same tokenizer, nothing is added again.
    ((_, rows, _, converted),) = ranks(1, vocabulary_ranks.grown, {}, tmp_path / "mca", size)
    ((*_, loaded),) = ranks(1, vocabulary_ranks.grown, {}, tmp_path / "hf", size)
    (transformers,) = ranks(1, vocabulary_ranks.grown_by_transformers, tmp_path / "hf", size)
    assert rows == size
    assert converted.keys() == loaded.keys() == transformers.keys()
    for name, value in converted.items():
        assert np.array_equal(value, loaded[name])
        assert np.array_equal(value, transformers[name])


def test_convert_job_refuses_a_longer_tokenizer_by_the_field_that_would_help(ranks: Any, tmp_path: Path) -> None:
    ranks(1, vocabulary_ranks.make_source, tmp_path / "hf", "llama")
    with pytest.raises(RankError, match=r"the vocabulary ends at 98; .*checkpoint\.resize_vocabulary: true"):
        ranks(1, vocabulary_ranks.convert, tmp_path / "hf", tmp_path / "mca", False)
