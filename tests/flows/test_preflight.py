"""What is refused before anything runs, from the recipe and the headers of a local model."""

import json
from pathlib import Path

import pytest

from flows.preflight import check_pending, check_recipe
from flows.recipe import PipelineConfig
from mca_lib.demo_assets import make_demo_assets
from mca_lib.errors import ConfigError, ModelError
from tasks.convert import CheckpointConfig
from tasks.dataset import ExecutorConfig


def recipe(folder: Path, **model: object) -> PipelineConfig:
    assets = make_demo_assets(folder / "assets")
    return PipelineConfig.model_validate(
        {
            "name": "test",
            "model": {"name_or_path": str(assets.model_dir), **model},
            "dataset": {"files": [str(assets.data_file)], "template": "chatml", "cutoff_len": 128},
            "store": {"path": str(folder / "store")},
        }
    )


def test_demonstration_is_accepted(tmp_path: Path):
    check_recipe(recipe(tmp_path))


def test_code_of_the_models_own_is_not_available(tmp_path: Path):
    with pytest.raises(ConfigError, match="trust_remote_code: not available in this release"):
        check_recipe(recipe(tmp_path, trust_remote_code=True))


def test_what_computing_lacks_is_named_before_a_run_and_no_matter_for_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = recipe(tmp_path)
    training = config.training.model_copy(update={"report_to": ["wandb"]})
    launcher = config.launcher.model_copy(update={"nproc_per_node": 1000})
    dataset = config.dataset.model_copy(update={"executor": ExecutorConfig(kind="ray")})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for update, said in (
        ({"training": training}, r"training\.report_to: the package wandb is not installed"),
        ({"launcher": launcher}, r"launcher\.nproc_per_node: 1000 ranks are too many"),
        ({"dataset": dataset}, r"dataset\.executor\.kind: ray is not installed"),
    ):
        check_recipe(config.model_copy(update=update))
        with pytest.raises(ConfigError, match=said):
            check_pending(config.model_copy(update=update))


def test_weights_of_another_size_than_the_config_says_are_named(tmp_path: Path):
    config = recipe(tmp_path)
    path = Path(config.model.name_or_path, "config.json")
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"intermediate_size": content["intermediate_size"] + 8}))
    with pytest.raises(ModelError, match=r"mlp\.\w+_proj\.weight .*, expected .* and \d+ more") as caught:
        check_recipe(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", ["vocabulary", "added tokens"])
def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_unless_rows_are_added(tmp_path: Path, where: str):
    config = recipe(tmp_path)
    model = Path(config.model.name_or_path)
    rows = json.loads((model / "config.json").read_text())["vocab_size"]
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    if where == "vocabulary":
        tokenizer["model"]["vocab"]["further"] = rows
    else:
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": rows, "content": "<further>"})
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=f"gives id {rows}, the vocabulary ends at {rows - 1}; .*resize_vocabulary"):
        check_recipe(config)
    check_recipe(config.model_copy(update={"checkpoint": CheckpointConfig(resize_vocabulary=True)}))
