"""The key of stage *translate*: what the hybrid is, and nothing about how it was written down. No job runs here."""

import pytest

from mca_lib.errors import ConfigError
from mca_lib.models.config import McaModelConfig
from mca_lib.tiny_models import make_tiny_model
from tasks.canonical import JSON
from tasks.checkpoint_config import CheckpointConfig, starting_model
from tasks.convert import ConvertStage, converted_bytes
from tasks.download import DownloadStage, ModelConfig
from tasks.stage import ensure
from tasks.store import Artifact, ArtifactStore
from tasks.translate import TranslateStage, fresh_summary

PATTERN = "M*-M*-"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("translate")
    directory = make_tiny_model(folder / "hf", num_hidden_layers=2, dtype="bfloat16")
    return ensure(ArtifactStore(folder / "store"), DownloadStage(ModelConfig(name_or_path=str(directory)))).artifact


def config(pattern: str = PATTERN, **fields: object) -> CheckpointConfig:
    return CheckpointConfig.model_validate({"kind": "hybrid", "pattern": pattern, **fields})


def identity(model: Artifact, pattern: str = PATTERN, **fields: object) -> dict[str, JSON]:
    return TranslateStage(model, config(pattern, **fields)).identity()


def test_sizes_that_are_given_as_they_would_be_derived_are_the_same_key(model: Artifact):
    assert identity(model) == identity(model, mamba={"num_heads": 4, "head_dim": 64, "state_size": 128})
    assert identity(model)["mamba"]["num_heads"] == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"mamba": {"state_size": 16}},
        {"seed": 1},
        {"fresh_layers": "zero_output"},
        {"pattern": "M*-*-"},
        {"resize_vocabulary": True},
    ],
)
def test_what_changes_the_hybrid_changes_the_key(model: Artifact, fields: dict):
    assert identity(model, **fields) != identity(model)


def test_without_mamba_layers_their_fields_are_no_part_of_the_key(model: Artifact):
    assert identity(model, "*-*-") == identity(
        model, "*-*-", seed=1, fresh_layers="zero_output", mamba={"state_size": 16}
    )


def test_fields_of_hybrids_are_no_part_of_the_key_of_a_conversion(model: Artifact):
    assert set(ConvertStage(model, CheckpointConfig()).identity()) == {
        "kind", "resize_vocabulary", "max_logits_difference",
    }  # fmt: skip


def test_content_of_the_model_is_an_input(model: Artifact):
    inputs = TranslateStage(model, config()).inputs()
    assert {name: source.digest for name, source in inputs.items()} == dict(model.parts)


def test_fresh_layers_take_room_and_are_named(model: Artifact):
    transformer = McaModelConfig.from_pretrained(model.path)
    hybrid = starting_model(transformer, config())
    assert converted_bytes(model.path, hybrid) > converted_bytes(model.path) > 0
    assert fresh_summary(hybrid, config(seed=3)) == "M*-M*-: 2 of 6 layers are fresh, random, seed 3: 0, 3"
    without = config("*-*-")
    assert fresh_summary(starting_model(transformer, without), without) == "*-*-: no fresh layers"


def test_a_model_that_is_a_hybrid_already_cannot_become_one(model: Artifact):
    hybrid = starting_model(McaModelConfig.from_pretrained(model.path), config())
    with pytest.raises(ConfigError, match=r"checkpoint\.pattern: the model is a hybrid already, of pattern 'M\*-M\*-'"):
        starting_model(hybrid, config())
