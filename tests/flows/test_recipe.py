"""The recipe says what is wrong, where, and on one line."""

from pathlib import Path

import pytest
import yaml

from flows.recipe import PipelineConfig, load_recipe
from mca_lib.errors import ConfigError
from tasks.section import EXECUTION

MINIMAL = {"model": {"name_or_path": "model"}, "dataset": {"files": ["rows.json"], "template": "qwen"}}

WRONG = [
    ("dataset.cutof_len=8", "dataset.cutof_len: unknown field; did you mean cutoff_len?"),
    ("trainin.seed=1", "trainin: unknown field; did you mean training?"),
    ("training.learning_rate=fast", "training.learning_rate: input should be a valid number"),
    ("training.learning_rate=0", "training.learning_rate: input should be greater than 0"),
    ("training.learning_rate=.nan", "training.learning_rate: "),
    ("training.stage=rl", "training.stage: input should be 'pt', 'sft' or 'dpo'"),
    ("dataset.template=null", "dataset.template: required for training.stage sft"),
    ("dataset.files=[]", "dataset.files: name data files there, or entries of dataset_info.json"),
    ("dataset.names=[a]", "both are given"),
    ("dataset.formatting=text", "dataset.formatting: text has no answers to learn"),
    ("dataset.ranking=true", "dataset.ranking: rows with two answers are for training.stage dpo, not sft"),
    ("training.stage=dpo", "dataset.ranking: training.stage dpo needs rows with a chosen and a rejected answer"),
    ("training.min_learning_rate=1", "training.min_learning_rate: greater than training.learning_rate"),
    ("training.load_best_model_at_end=true", "training.load_best_model_at_end: needs evaluations to choose from"),
    ("parallel.tensor=2", "launcher.nproc_per_node: 1 ranks cannot be split into parallel.tensor=2"),
    ("training.micro_batch_size=3", "training.global_batch_size: 8 is not a multiple of"),
    ("parallel.virtual_pipeline=2", "parallel.virtual_pipeline: 2 needs parallel.pipeline of at least 2"),
    ("training.learning_rate=true", "training.learning_rate: true is not a value for this field"),
    ("parallel.tensor=true", "parallel.tensor: true is not a value for this field"),
    ("training.max_steps=0", "training.max_steps: 0 steps train nothing"),
    ("training.num_train_epochs=1e308", "training.num_train_epochs: "),
    ("training.global_batch_size=8000000", "training.global_batch_size: input should be less than or equal to 1000000"),
    ("training.weight_decay=1e5", "training.weight_decay: input should be less than or equal to 10"),
    ("lora.r=100000", "lora.r: input should be less than or equal to 4096"),
    ("launcher.nproc_per_node=1000000", "launcher.nproc_per_node: "),
    ("training={seed: 1, seed: 2}", "--set training={seed: 1, seed: 2}"),
    ("model=null", "model: field required"),
    ("training", "--set training: expected section.field=value"),
    ("=1", "--set =1: expected section.field=value"),
    ("training.seed=[", "--set training.seed=[: the value is not valid YAML"),
    ("training.seed.x=1", "training.seed"),
    ("checkpoint.pattern=M*-", "checkpoint.pattern: is for hybrids, and checkpoint.kind is gpt"),
    ("checkpoint={mamba: {state_size: 16}}", "checkpoint.mamba: is for hybrids, and checkpoint.kind is gpt"),
    ("checkpoint.seed=1", "checkpoint.seed: is for hybrids"),
    ("checkpoint.fresh_layers=zero_output", "checkpoint.fresh_layers: is for hybrids"),
    ("checkpoint.kind=hybrid", "checkpoint.pattern is missing: write one symbol per layer, as M*-*-; `mcaflow hybrid-"),
    ("checkpoint={kind: hybrid, pattern: 'M*X'}", "checkpoint.pattern='M*X': 'X' is no layer"),
    (
        "checkpoint={kind: hybrid, pattern: 'M*-|*-'}",
        "checkpoint.pattern='M*-|*-': pipeline stages (|) belong to a run",
    ),
    ("checkpoint={kind: hybrid, pattern: 'M*-/*-'}", "checkpoint.pattern='M*-/*-': multi-token prediction (/…)"),
    ("checkpoint={kind: hybrid, pattern: 7}", "checkpoint.pattern: input should be a valid string (given: 7)"),
    (
        "checkpoint={kind: hybrid, pattern: M*-, mamba: {heads: 2}}",
        "checkpoint.mamba.heads: unknown field; did you mean",
    ),
    ("checkpoint={kind: hybrid, pattern: M*-, mamba: {head_dim: 0}}", "checkpoint.mamba.head_dim: input should be gr"),
    (
        "checkpoint={kind: hybrid, pattern: M*-, fresh_layers: zero}",
        "checkpoint.fresh_layers: input should be 'random'",
    ),
]


def write(path: Path, content: object) -> Path:
    path.write_text(yaml.safe_dump(content) if not isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(("override", "message"), WRONG)
def test_wrong_field_is_named_on_one_line(tmp_path: Path, override: str, message: str):
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path / "recipe.yaml", MINIMAL), [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_name_may_stand_without_a_list(tmp_path: Path):
    given = ["training.report_to=tensorboard", "training.freeze=embed_tokens"]
    training = load_recipe(write(tmp_path / "recipe.yaml", MINIMAL), given).training
    assert (training.report_to, training.freeze) == (["tensorboard"], ["embed_tokens"])
    assert load_recipe(tmp_path / "recipe.yaml", ["training.report_to=none"]).training.report_to == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lr_scheduler_type=warmup_stable_decay", "decay_ratio=0.99"], "decay_ratio: 0.99 and training.warmup_ratio"),
        (["precision=fp32", "fp8=hybrid"], "fp8: needs training.precision bf16, not fp32"),
        (["optimizer_offload_fraction=0.5"], "optimizer_offload_fraction: Megatron cannot save such an optimizer"),
        (["overlap_param_gather=true"], "overlap_param_gather: needs training.overlap_grad_reduce: true"),
        (["finetuning_type=lora", "freeze=[lm_head]"], "freeze: has no effect with training.finetuning_type lora"),
        (["finetuning_type=lora", "moe_router_bias_update_rate=0.1"], "moe_router_bias_update_rate: has no effect"),
    ],
)
def test_options_of_training_that_do_not_go_together(tmp_path: Path, overrides: list[str], message: str):
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path / "recipe.yaml", MINIMAL), [f"training.{each}" for each in overrides])
    assert f"training.{message}" in str(caught.value)


def test_adapters_are_refused_where_they_would_leave_fresh_layers_untrained(tmp_path: Path):
    recipe, lora = write(tmp_path / "recipe.yaml", MINIMAL), "training.finetuning_type=lora"
    with pytest.raises(ConfigError, match=r"training\.finetuning_type: lora would leave the fresh Mamba layers"):
        load_recipe(recipe, ["checkpoint={kind: hybrid, pattern: M*-}", lora])
    load_recipe(recipe, ["checkpoint={kind: hybrid, pattern: '*-'}", lora])


def test_evaluations_without_held_out_rows_are_refused(tmp_path: Path):
    recipe = write(tmp_path / "recipe.yaml", MINIMAL)
    with pytest.raises(ConfigError, match=r"training\.eval_steps: no rows are held out; set dataset\.eval_fraction"):
        load_recipe(recipe, ["training.eval_steps=10", "dataset.eval_fraction=0"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dataset.template=null", "dataset.template: required for training.stage dpo"),
        ("dataset.formatting=text", "dataset.formatting: text has no answers to learn"),
        ("dataset.train_on_prompt=true", "dataset.train_on_prompt: pairs are compared by their answers alone"),
        ("dpo.pref_loss=kto_pair", "dpo.pref_loss: input should be 'sigmoid', 'hinge', 'ipo', 'orpo' or 'simpo'"),
        ("dpo.use_ref_model=false", "dpo.use_ref_model: dpo.pref_loss sigmoid needs a reference model"),
        ("dpo.simpo_gamma=1", "dpo.simpo_gamma: has no effect with dpo.pref_loss sigmoid"),
        ("dpo.label_smoothing=0.5", "dpo.label_smoothing: input should be less than 0.5"),
    ],
)
def test_wrong_field_of_a_preference_recipe_is_named_on_one_line(tmp_path: Path, override: str, message: str):
    content = {**MINIMAL, "dataset": {**MINIMAL["dataset"], "ranking": True}, "training": {"stage": "dpo"}}
    recipe = write(tmp_path / "recipe.yaml", content)
    assert load_recipe(recipe).training.stage == "dpo"
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "[1]", "a: b: c", "text", "\tx"])
def test_file_that_is_no_recipe_is_refused(tmp_path: Path, content: str):
    with pytest.raises(ConfigError, match=r"recipe\.yaml"):
        load_recipe(write(tmp_path / "recipe.yaml", content))


def test_a_key_that_stands_twice_is_refused(tmp_path: Path):
    recipe = "model: {name_or_path: m}\ntraining: {seed: 1}\ndataset: {files: [a]}\ntraining: {seed: 2}\n"
    with pytest.raises(ConfigError, match="'training' stands twice"):
        load_recipe(write(tmp_path / "recipe.yaml", recipe))


def test_an_empty_section_is_its_defaults(tmp_path: Path):
    config = load_recipe(write(tmp_path / "recipe.yaml", {**MINIMAL, "eval": None}))
    assert config.eval == PipelineConfig.model_validate(MINIMAL).eval


def test_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        load_recipe(tmp_path / "nowhere.yaml")


def test_override_replaces_a_field_and_creates_a_section(tmp_path: Path):
    config = load_recipe(
        write(tmp_path / "recipe.yaml", MINIMAL), ["training.learning_rate=3e-4", "dataset.files=[a.json, b.json]"]
    )
    assert config.training.learning_rate == 3e-4
    assert config.dataset.files == ["a.json", "b.json"]


def test_parallel_layout_and_launcher_are_execution_throughout():
    config = PipelineConfig.model_validate(MINIMAL)
    assert config.parallel.identity() == {}
    assert config.launcher.identity() == {}
    assert config.store.identity() == {}


def test_what_decides_the_weights_is_identity():
    config = PipelineConfig.model_validate(MINIMAL)
    assert {"learning_rate", "global_batch_size", "seed", "precision", "num_train_epochs"} <= set(
        config.training.identity()
    )
    assert "micro_batch_size" in config.training.execution()


def test_every_section_field_is_either_identity_or_execution():
    config = PipelineConfig.model_validate(MINIMAL)
    for name in PipelineConfig.model_fields:
        section = getattr(config, name)
        if hasattr(section, "identity"):
            fields = set(type(section).model_fields)
            assert section.identity_fields() | set(section.execution()) == fields
            assert not section.identity_fields() & set(section.execution())


def test_mark_survives_pydantic():
    assert EXECUTION in PipelineConfig.model_fields["name"].metadata


def test_every_field_has_a_meaning_of_its_own() -> None:
    """What `mcaflow fields` prints."""
    sections = {name: field.annotation for name, field in PipelineConfig.model_fields.items() if name != "name"}
    meanings = {f"{s}.{f}": i.description for s, section in sections.items() for f, i in section.model_fields.items()}
    assert [name for name, meaning in meanings.items() if not meaning] == []
