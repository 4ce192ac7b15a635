"""The recipes that the project ships."""

from pathlib import Path

from flows.hybrid_command import pattern_for
from flows.recipe import load_recipe
from mca_lib.tiny_models import SHAPE

RECIPES = Path(__file__).parents[2] / "deployments" / "recipes"


def test_demo_reads_what_make_demo_writes():
    """`make demo` calls `python -m mca_lib.demo_assets .mcaflow/demo`."""
    demo = load_recipe(RECIPES / "demo.yaml")
    assert "DEMO := .mcaflow/demo\n" in (RECIPES.parents[1] / "Makefile").read_text()
    assert demo.model.name_or_path == ".mcaflow/demo/model"
    assert demo.dataset.files == [".mcaflow/demo/data.json"]


def test_demo_dpo_reads_what_make_demo_writes():
    demo = load_recipe(RECIPES / "demo-dpo.yaml")
    assert (demo.model.name_or_path, demo.dataset.files) == (".mcaflow/demo/model", [".mcaflow/demo/pairs.json"])
    assert (demo.training.stage, demo.dataset.ranking) == ("dpo", True)


def test_demo_lora_reads_what_make_demo_writes():
    demo = load_recipe(RECIPES / "demo-lora.yaml")
    assert (demo.model.name_or_path, demo.dataset.files) == (".mcaflow/demo/model", [".mcaflow/demo/data.json"])
    assert (demo.training.finetuning_type, demo.lora.target_modules) == ("lora", ["all-linear"])


def test_demo_pt_reads_what_make_demo_writes():
    demo = load_recipe(RECIPES / "demo-pt.yaml")
    assert (demo.model.name_or_path, demo.dataset.files) == (".mcaflow/demo/model", [".mcaflow/demo/data.json"])
    assert (demo.training.stage, demo.dataset.storage) == ("pt", "indexed")


def test_demo_hybrid_reads_what_make_demo_writes_and_has_the_pattern_that_is_printed_for_it():
    demo = load_recipe(RECIPES / "demo-hybrid.yaml")
    assert (demo.model.name_or_path, demo.dataset.files) == (".mcaflow/demo/model", [".mcaflow/demo/data.json"])
    assert demo.checkpoint.pattern == pattern_for(SHAPE["num_hidden_layers"], None, mamba_every=2)


def test_smollm2_takes_its_data_file_from_the_command_line():
    recipe = load_recipe(RECIPES / "smollm2-sft.yaml", ["dataset.files=[mine.json]"])
    assert recipe.dataset.files == ["mine.json"]
    hybrid = load_recipe(RECIPES / "smollm2-hybrid.yaml", ["dataset.files=[mine.json]"])
    assert hybrid.checkpoint.pattern == pattern_for(30, None, mamba_every=3)
