"""What is refused before anything runs, from the recipe and the headers of a local model."""

import json
from pathlib import Path

import pytest

from flows.hybrid_command import pattern_for
from flows.preflight import check_pending, check_recipe
from flows.recipe import PipelineConfig
from mca_lib.demo_assets import make_demo_assets
from mca_lib.errors import ConfigError, ModelError
from tasks.checkpoint_config import CheckpointConfig
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


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> PipelineConfig:
    """The demonstration, whose model has four layers."""
    return recipe(tmp_path_factory.mktemp("four"))


def hybrid(config: PipelineConfig, pattern: str, **sections: dict) -> PipelineConfig:
    content = config.model_dump()
    content["checkpoint"] |= {"kind": "hybrid", "pattern": pattern}
    for name, fields in sections.items():
        content[name] |= fields
    return PipelineConfig.model_validate(content)


TWO_RANKS = {"launcher": {"nproc_per_node": 2}}


@pytest.mark.parametrize(
    ("pattern", "sections", "said"),
    [
        ("M*-*-*-", {}, "checkpoint.pattern='M*-*-*-' has 3 attention and MLP layers, and the transformer has 4"),
        ("M*-*-*-*", {}, "checkpoint.pattern='M*-*-*-*' has 4 attention (*) and 3 MLP"),
        ("MM", {}, "checkpoint.pattern='MM' has 0 attention"),
        ("*-*-*-*E", {}, "checkpoint.pattern='*-*-*-*E' mixes dense"),
        ("*E*E*E*E", {}, "checkpoint.pattern='*E*E*E*E' has mixture of experts layers (E)"),
        ("-*-*-*-*", {}, "checkpoint.pattern='-*-*-*-*': an MLP comes before"),
        ("G*-*-*-*-", {}, "G (gated delta net) cannot start from a transformer"),
        ("M*-*-*-D-", {}, "D (sparse attention (DSA)) cannot start from a transformer"),
        ("M*-*-*-*-", {"checkpoint": {"mamba": {"head_dim": 37}}}, "checkpoint.mamba.head_dim: 37 does not divide"),
        ("M*-*-*-*-", {"training": {"use_mca": False}}, "training.use_mca: LLaMA-Factory's trainers have no hybrid"),
        ("M*-*-*-*-", {"parallel": {"tensor": 2}, **TWO_RANKS}, "parallel.tensor=2"),
        (
            "M*-*-*-*-",
            {"parallel": {"pipeline": 2, "pipeline_layout": "*-*-|M*-*-"}, **TWO_RANKS},
            "parallel.pipeline_layout='*-*-|M*-*-'",
        ),
    ],
)  # fmt: skip
def test_a_hybrid_that_cannot_be_made_or_trained_is_refused_by_the_recipes_field(
    four_layers: PipelineConfig, pattern: str, sections: dict, said: str
):
    with pytest.raises(ConfigError) as caught:
        check_recipe(hybrid(four_layers, pattern, **sections))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hybrid_is_accepted_with_the_pattern_that_is_printed_for_it(four_layers: PipelineConfig):
    pattern = pattern_for(None, Path(four_layers.model.name_or_path), mamba_every=2)
    assert pattern == pattern_for(4, None, mamba_every=2) == "M*-*-M*-*-"
    check_recipe(hybrid(four_layers, pattern))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"eval": {"tasks": ["no_such_task"]}}, r"^eval\.tasks: 'no_such_task' is no task"),
        ({"eval": {"tasks": ["arc_easy"], "engine": "vllm"}}, r"^eval\.engine: the package vllm is not installed"),
        (
            {"eval": {"tasks": ["arc_easy"]}, "promote": {"model": "chat", "gate": ["arc_easy.accuracy > 0.3"]}},
            r"^promote\.gate: .*: no task measures arc_easy\.accuracy; measured: arc_easy\.acc, arc_easy\.acc_norm$",
        ),
    ],
)
def test_tasks_are_checked_before_anything_runs(tmp_path: Path, fields: dict, said: str):
    config = PipelineConfig.model_validate(recipe(tmp_path).model_dump() | fields)
    with pytest.raises(ConfigError, match=said):
        check_recipe(config)


def test_a_hub_is_asked_where_tasks_are_to_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = recipe(tmp_path)
    with_tasks = PipelineConfig.model_validate(config.model_dump() | {"eval": {"tasks": ["arc_easy"]}})
    check_recipe(with_tasks)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="allenai/ai2_arc is on a hub, and HF_HUB_OFFLINE forbids"):
        check_pending(with_tasks)
    check_pending(config)
