"""A training that others start from, made once."""

from pathlib import Path

import pytest

from tests.mca_lib.checkpoint import source_training
from tests.mca_lib.checkpoint.source_training import OPTIONS
from tests.mca_lib.trainers.training import train


@pytest.fixture(scope="session")
def source_folder(ranks, tmp_path_factory) -> Path:
    """A folder with the models `dense` and `experts` and a token `store`."""
    folder = tmp_path_factory.mktemp("sources")
    ranks(1, source_training.make_models, folder)
    return folder


@pytest.fixture(scope="session")
def transformer(ranks, source_folder) -> source_training.Training:
    """The training of the dense transformer on one rank."""
    steps = ranks(1, train, f"{source_folder}/dense", f"{source_folder}/store", f"{source_folder}/transformer", OPTIONS)
    return source_training.Training(source_folder / "transformer", steps)
