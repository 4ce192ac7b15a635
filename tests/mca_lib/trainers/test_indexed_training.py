"""Training on Megatron's indexed format equals plain torch, document by document, at every layout."""

from pathlib import Path

import numpy as np
import pytest

from tests.mca_lib.trainers.training import HYPERPARAMETERS, history, make_model, plain_training, read_json, train

STEPS = 6  # of 4 rows; an epoch has 4 and a short one
# fp32; sums are taken in another order.
TOLERANCE = 1e-4
LAYOUTS = {
    "DP2": (2, {"preflight": True}),
    "CP2": (2, {"context_parallel_size": 2}),
    "TP2 PP2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "micro batch of 2": (1, {"per_device_train_batch_size": 2}),
}


def make_indexed(directory: Path) -> list[int]:
    """A blend of two corpora of random documents, longer and shorter than a row. Returns the rows of each."""
    from mca_lib.data.indexed_format import open_indexed, token_dtype, write_index
    from mca_lib.data.indexed_split import CorpusSource, write_indexed_split

    random, sources = np.random.default_rng(0), []
    (directory / "train").mkdir(parents=True)
    for number, documents in enumerate((12, 20)):
        lengths = random.integers(2, 40, documents).astype(np.int32)
        prefix = directory / f"given-{number}"
        random.integers(0, 12, lengths.sum()).astype(token_dtype(128)).tofile(f"{prefix}.bin")
        write_index(prefix.with_suffix(".idx"), lengths, token_dtype(128))
        chosen = np.arange(documents, dtype=np.int32)
        sources.append(CorpusSource(f"corpus-{number}", "", open_indexed(prefix), chosen, number + 1.0, "", 11))
    return write_indexed_split(directory / "train", sources, sequence_length=32, seed=1).rows_of_corpora


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexed training")
    ranks(1, make_model, folder / "model")
    (rows,) = ranks(1, make_indexed, folder / "store")
    assert all(rows)
    assert sum(rows) % HYPERPARAMETERS["global_batch_size"]
    assert sum(rows) // HYPERPARAMETERS["global_batch_size"] + 1 < STEPS
    return folder


@pytest.fixture(scope="module")
def plain(ranks, folder) -> np.ndarray:
    return np.array(ranks(1, plain_training, f"{folder}/model", f"{folder}/store", STEPS)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradient_norms_equal_plain_torch(ranks, folder, plain, layout):
    world_size, options = LAYOUTS[layout]
    options = {"max_steps": STEPS, **options}
    values = ranks(world_size, train, f"{folder}/model", f"{folder}/store", f"{folder}/{layout}", options)
    np.testing.assert_allclose(history(values), plain, rtol=0, atol=TOLERANCE)
    assert read_json(folder / layout / "train_result.json")["tokens"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 129}, "its rows have 129 tokens, and the model 128 positions"),
        ({"largest_id": 128}, "has token 128, and the model has 128; tokenize with the model's own tokenizer"),
    ],
)
def test_rows_that_the_model_does_not_fit_are_refused_before_the_first_step(folder, changes, message, tmp_path):
    from mca_lib.data.indexed_rows import IndexedRows
    from mca_lib.errors import DataError
    from mca_lib.models import McaModelConfig
    from mca_lib.trainers.row_checks import check_rows

    store = IndexedRows.open(folder / "store" / "train")
    vars(store).update(changes)
    config = McaModelConfig.from_pretrained(folder / "model")
    with pytest.raises(DataError, match=message):
        check_rows(store, config)
