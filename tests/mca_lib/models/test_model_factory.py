"""Making, loading and saving models: the same weights from either format, at any layout."""

import re
from pathlib import Path
from typing import Any

import pytest

from mca_lib.errors import CheckpointError
from tests.mca_lib.models import factory_ranks
from tests.mca_lib.tiny_models import save_hf
from tests.ranks import RankError


@pytest.fixture(scope="module")
def hf(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories `untied` (biases, qk-norm), `tied`, `dropout`, `residual-dropout`."""
    directory = tmp_path_factory.mktemp("hf")
    ranks(1, save_hf, directory / "untied", "qwen3")
    ranks(1, save_hf, directory / "tied", "qwen2-tied", "bfloat16")
    ranks(1, save_dropout, directory / "dropout", "llama", {"attention_dropout": 0.5})
    ranks(1, save_dropout, directory / "residual-dropout", "seed-oss", {"residual_dropout": 0.5})
    return directory


def save_dropout(directory: Path, variant: str, dropout: dict[str, float]) -> None:
    save_hf(directory, variant, **dropout)


@pytest.fixture(scope="module")
def mca(ranks: Any, hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as MCA checkpoints, each written at another layout."""
    directory = tmp_path_factory.mktemp("mca")
    uneven = {"tensor": 2, "pipeline": 2, "pipeline_layout": "Et*4|L"}
    ranks(4, factory_ranks.save_at, uneven, hf / "untied", directory / "untied")
    ranks(4, factory_ranks.save_at, {"tensor": 2, "pipeline": 2}, hf / "tied", directory / "tied")
    return directory


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, {}),
        (2, {}),  # two replicas
        (2, {"tensor": 2}),
        (4, {"tensor": 4}),  # ranks share key/value heads, and one rank's vocabulary is mostly padding
        (2, {"pipeline": 2, "virtual_pipeline": 2}),
        (2, {"pipeline": 2, "last_stage_layers": 1}),
        (2, {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "E|t*2|t|tL"}),
        (4, {"tensor": 2, "pipeline": 2, "sequence_parallel": True}),
    ],
)
@pytest.mark.parametrize("model", ["untied", "tied"])
def test_either_format_gives_the_same_bytes_at_every_layout(
    ranks: Any, hf: Path, mca: Path, model: str, world_size: int, layout: dict[str, Any]
) -> None:
    reports = ranks(world_size, factory_ranks.same_from_both_formats, layout, hf / model, mca / model)
    assert all(same for same, _ in reports)
    assert all(count > 5 for _, count in reports)


@pytest.mark.parametrize("fmt", ["hf", "mca"])
def test_dtype_is_what_the_arguments_ask_for(ranks: Any, hf: Path, mca: Path, fmt: str) -> None:
    directory = {"hf": hf, "mca": mca}[fmt]
    assert ranks(1, factory_ranks.dtypes_at, directory / "tied", False) == [{"torch.float32"}]  # stored in bf16
    assert ranks(1, factory_ranks.dtypes_at, directory / "untied", True) == [{"torch.bfloat16"}]  # stored in fp32


@pytest.mark.parametrize("fmt", ["hf", "mca"])
def test_weight_that_is_too_large_for_the_dtype_is_named(ranks: Any, tmp_path: Path, fmt: str) -> None:
    """Not an infinity in the model."""
    ranks(1, save_hf, tmp_path / "hf", "qwen2")
    ranks(1, factory_ranks.set_weight, tmp_path / "hf", "model.layers.1.mlp.up_proj.weight", -1e5)
    ranks(1, "mca_lib.converter.stream:convert_hf", tmp_path / "hf", tmp_path / "mca")
    with pytest.raises(RankError, match=r"ConfigError: .*(up_proj|linear_fc1)\.weight has the value 100000, float16"):
        ranks(1, factory_ranks.parameters_at, {"fp16": True}, tmp_path / fmt)
    ranks(1, factory_ranks.parameters_at, {"bf16": True}, tmp_path / fmt)


def test_widening_is_exact(ranks: Any, hf: Path) -> None:
    """bf16 weights in an fp32 model have the values of the file."""
    from safetensors.torch import load_file

    (parameters,) = ranks(1, factory_ranks.parameters_at, {}, hf / "tied")
    stored = load_file(hf / "tied" / "model.safetensors")["model.embed_tokens.weight"]
    assert (parameters["embedding.word_embeddings.weight"] == stored.float().numpy()).all()


def test_padding_of_the_vocabulary_is_zero(ranks: Any, hf: Path, mca: Path) -> None:
    for directory in (hf / "untied", mca / "untied"):
        parameters = ranks(2, factory_ranks.parameters_at, {"tensor": 2}, directory)
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert parameters[1][name].shape[0] == 50  # 99 tokens on two ranks
            assert not parameters[1][name][-1].any()
            assert parameters[1][name][-2].any()


def test_model_with_random_weights_is_saved_without_padding(ranks: Any, hf: Path, tmp_path: Path) -> None:
    ranks(2, factory_ranks.random_checkpoint, {"tensor": 2}, hf / "untied", tmp_path / "mca")
    (parameters,) = ranks(1, factory_ranks.parameters_at, {}, tmp_path / "mca")
    assert parameters["output_layer.weight"].shape[0] == 99
    assert 0.15 < parameters["output_layer.weight"].std() < 0.25  # initializer_range is 0.2


@pytest.mark.parametrize(
    ("layout", "keys"),
    [({"pipeline": 2}, ["model"]), ({"pipeline": 2, "virtual_pipeline": 2}, ["model0", "model1"])],
)
def test_state_dict_restores_the_weights(ranks: Any, hf: Path, layout: dict[str, Any], keys: list[str]) -> None:
    assert ranks(2, factory_ranks.state_dict_round_trip, layout, hf / "tied") == [(keys, True)] * 2


def test_packed_documents_never_see_each_other(ranks: Any, hf: Path) -> None:
    ((b_is_the_same, a_is_the_same),) = ranks(1, factory_ranks.documents_are_independent, hf / "untied")
    assert b_is_the_same
    assert not a_is_the_same


def test_row_may_go_on_beyond_its_documents(ranks: Any, hf: Path) -> None:
    (difference,) = ranks(1, factory_ranks.trailing_padding_changes_nothing, hf / "untied")
    assert difference < 1e-5


def test_dropout_is_random_consistent_and_different_for_every_head(ranks: Any, hf: Path) -> None:
    assert ranks(2, factory_ranks.attention_dropout, hf / "dropout") == [(True, True, True)] * 2


def test_dropout_on_the_residual_is_the_same_on_ranks_that_share_it_and_leaves_embeddings(ranks: Any, hf: Path) -> None:
    assert ranks(2, factory_ranks.residual_dropout, hf / "residual-dropout") == [(True, True, True)] * 2


@pytest.mark.parametrize("granularity", ["selective", "full"])
def test_recomputation_changes_nothing(ranks: Any, hf: Path, granularity: str) -> None:
    assert ranks(1, factory_ranks.recompute_changes_nothing, hf / "untied", granularity) == [0.0]


def test_context_parallel_ranks_share_a_row_in_zigzag(ranks: Any, hf: Path) -> None:
    cut = ranks(2, factory_ranks.cp_slices, {"context": 2}, hf / "tied", None, 8)
    assert cut == [([0, 1, 6, 7], "kept"), ([2, 3, 4, 5], "kept")]


def test_context_parallel_ranks_share_each_document(ranks: Any, hf: Path) -> None:
    cut = ranks(2, factory_ranks.cp_slices, {"context": 2}, hf / "tied", (4, 8), 16)  # and 4 of padding
    assert cut[0][0] == [0, 3, 4, 5, 10, 11, 12, 15]
    assert cut[1][0] == [1, 2, 6, 7, 8, 9, 13, 14]


def test_document_that_does_not_divide_over_context_ranks_is_refused(ranks: Any, hf: Path) -> None:
    with pytest.raises(RankError, match="DataError: a sequence of 6 tokens does not divide by 2 x context"):
        ranks(2, factory_ranks.cp_slices, {"context": 2}, hf / "tied", (6, 8), 14)


def test_batch_with_sequences_of_two_lengths_is_refused(ranks: Any, hf: Path) -> None:
    """One of them would pass through whole."""
    with pytest.raises(RankError, match=r"DataError: .* must have one T .* input_ids 8, labels 16"):
        ranks(2, factory_ranks.cp_slices, {"context": 2}, hf / "tied", None, 8, 16)


def test_models_say_in_one_line_what_they_are(ranks: Any, hf: Path) -> None:
    (first, second) = ranks(2, factory_ranks.described, {"pipeline": 2, "virtual_pipeline": 2}, hf / "tied")
    assert re.fullmatch(
        r"VirtualModels\(qwen2, [\d,]+ parameters on this rank, 2 chunks, pipeline=2 virtual_pipeline=2\)", first[0]
    )
    assert first[1] == second[1]
    assert "models[0](input_ids, position_ids)" in first[1]


@pytest.mark.parametrize("write", [factory_ranks.export_at, factory_ranks.save_adapters_at])
def test_folders_of_a_like_name_are_left_alone(ranks: Any, hf: Path, tmp_path: Path, write: Any) -> None:
    (tmp_path / "out-passage" / "model").mkdir(parents=True)
    (tmp_path / "out-passage" / "model" / "mine").write_text("kept")
    ranks(2, write, {"tensor": 2}, hf / "tied", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out-passage"]
    assert (tmp_path / "out-passage" / "model" / "mine").read_text() == "kept"


def test_every_rank_gets_the_error_of_the_first(ranks: Any, hf: Path, tmp_path: Path) -> None:
    """None waits at a barrier for one that has failed."""
    (tmp_path / "full" / "model").mkdir(parents=True)
    (tmp_path / "full" / "model" / "old").write_text("kept")
    (tmp_path / "file").write_text("kept")
    errors = ranks(2, factory_ranks.errors_of_saving, {"tensor": 2}, hf / "tied", tmp_path)
    for save_error, export_error, parent_error in errors:
        assert re.match(r"CheckpointError: .*full/model: not empty", save_error)
        assert re.match(r"ConfigError: .*full: exists and is not empty", export_error)
        assert re.match(r"FileExistsError: .*file", parent_error)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "full"]


def test_every_rank_is_told_that_the_base_of_adapters_is_damaged(ranks: Any, hf: Path, tmp_path: Path) -> None:
    ranks(1, "mca_lib.converter.stream:convert_hf", hf / "tied", tmp_path / "mca")
    record = tmp_path / "mca" / "model" / "digest.json"
    record.write_text(record.read_text().replace("bfloat16", "float16", 1))
    errors = ranks(2, factory_ranks.error_of_base_digest, tmp_path / "mca")
    assert errors == [f"{record}: is damaged; convert the model again"] * 2


def test_model_needs_process_groups(ranks: Any, hf: Path) -> None:
    with pytest.raises(RankError, match="initialize_model_parallel"):
        ranks(1, factory_ranks.load_without_process_groups, hf / "tied")


def test_checkpoint_is_not_written_over_another(ranks: Any, hf: Path, mca: Path) -> None:
    with pytest.raises(RankError, match=f"{CheckpointError.__name__}: .* not empty"):
        ranks(1, factory_ranks.save_at, {}, hf / "untied", mca / "untied")
