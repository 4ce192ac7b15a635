"""The stages *convert* and *export* on a real store, with a real model and the real jobs."""

import json
import shutil
from pathlib import Path

import pytest

from mca_lib.errors import ModelError
from mca_lib.tiny_models import make_tiny_model
from tasks.checkpoint_config import CheckpointConfig
from tasks.convert import ConvertStage
from tasks.download import DownloadStage, ModelConfig
from tasks.export import ExportConfig, ExportStage
from tasks.stage import Hit, Miss, ensure, probe
from tasks.store import Artifact, ArtifactStore

pytestmark = pytest.mark.usefixtures("forked_jobs")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ArtifactStore:
    return ArtifactStore(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "hf", num_hidden_layers=2, dtype="bfloat16")


@pytest.fixture(scope="module")
def model(store: ArtifactStore, directory: Path) -> Artifact:
    return ensure(store, DownloadStage(ModelConfig(name_or_path=str(directory)))).artifact


@pytest.fixture(scope="module")
def converted(store: ArtifactStore, model: Artifact) -> Artifact:
    return ensure(store, ConvertStage(model, CheckpointConfig())).artifact


@pytest.fixture(scope="module")
def exported(store: ArtifactStore, converted: Artifact) -> Artifact:
    return ensure(store, ExportStage(converted, ExportConfig())).artifact


def test_checkpoint_is_self_sufficient_and_proven(converted: Artifact) -> None:
    names = {p.name for p in converted.path.iterdir()}
    assert {"mca_config.json", "model", "tokenizer.json", "chat_template.jinja", "generation_config.json"} <= names
    assert converted.record.stats["logits"]["max_difference"] <= 1e-4
    assert set(converted.parts) == {"weights", "config", "tokenizer", "generation"}


def test_export_gives_back_the_bytes_of_the_source(exported: Artifact, directory: Path) -> None:
    import torch
    from safetensors.torch import load_file

    before, after = (load_file(d / "model.safetensors") for d in (directory, exported.path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in before)
    first, second = (json.loads((d / "config.json").read_text()) for d in (directory, exported.path))
    assert first == second


def test_both_are_hits_afterwards(
    store: ArtifactStore, model: Artifact, converted: Artifact, exported: Artifact
) -> None:
    assert isinstance(probe(store, ConvertStage(model, CheckpointConfig())), Hit)
    assert isinstance(probe(store, ExportStage(converted, ExportConfig())), Hit)


def test_same_bytes_at_another_place_are_a_hit(
    store: ArtifactStore, directory: Path, converted: Artifact, tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(directory, tmp_path / "elsewhere"))
    model = ensure(store, DownloadStage(ModelConfig(name_or_path=str(moved)))).artifact
    assert isinstance(probe(store, ConvertStage(model, CheckpointConfig())), Hit)


def test_checkpoint_computed_again_invalidates_nothing(
    store: ArtifactStore, model: Artifact, converted: Artifact, exported: Artifact
) -> None:
    again = ensure(store, ConvertStage(model, CheckpointConfig()), refresh=True).artifact
    assert again.digest == converted.digest
    assert isinstance(probe(store, ExportStage(again, ExportConfig())), Hit)


def test_dtype_of_the_export_is_in_its_key(store: ArtifactStore, converted: Artifact, exported: Artifact) -> None:
    found = probe(store, ExportStage(converted, ExportConfig(dtype="float32")))
    assert isinstance(found, Miss)
    assert [change.field for change in found.changed] == ["identity.dtype"]


def test_model_whose_config_lies_fails_in_one_line(store: ArtifactStore, directory: Path, tmp_path: Path) -> None:
    lying = Path(shutil.copytree(directory, tmp_path / "lying"))
    config = json.loads((lying / "config.json").read_text())
    (lying / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    model = ensure(store, DownloadStage(ModelConfig(name_or_path=str(lying)))).artifact
    with pytest.raises(ModelError, match=r"not used by the model: model\.layers\.1") as error:
        ensure(store, ConvertStage(model, CheckpointConfig()))
    assert "\n" not in str(error.value)
