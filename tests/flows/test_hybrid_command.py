"""`mcaflow hybrid-pattern` prints a pattern that fits, alone, or says what is wrong."""

import json
from pathlib import Path

import pytest
import yaml

from flows.hybrid_command import pattern_for
from mca_lib.errors import ConfigError, ModelError
from tests.flows.test_cli import mcaflow
from tests.mca_lib.models.test_registry import BASES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("llama", "qwen3_moe", "deepseek_v3", "seed_oss"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(BASES[name]))
    content = {
        "model": {"name_or_path": str(tmp_path / "llama")},
        "dataset": {"files": ["rows.json"], "template": "chatml"},
        "checkpoint": {"kind": "hybrid"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    return tmp_path


def test_a_recipe_without_its_pattern_gets_one_for_its_model(folder: Path):
    printed = mcaflow(folder, "hybrid-pattern", "--model", "recipe.yaml", "--mamba-every", "3")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert printed.stdout == pattern_for(BASES["llama"]["num_hidden_layers"], None, mamba_every=3) + "\n"


def test_a_recipe_that_lacks_its_data_too_gets_one(folder: Path):
    bare = folder / "bare.yaml"
    bare.write_text(yaml.safe_dump({"model": {"name_or_path": str(folder / "llama")}}))
    assert pattern_for(None, bare, mamba_every=2).startswith("M*-")
    bare.write_text("name: none\n")
    with pytest.raises(ConfigError, match=r"bare\.yaml: model\.name_or_path: field required"):
        pattern_for(None, bare, mamba_every=2)


@pytest.mark.parametrize(("layers", "every", "moe", "pattern"), [
    (4, 2, False, "M*-*-M*-*-"), (3, 1, True, "M*EM*EM*E"), (2, 0, False, "*-*-"), (2, 9, False, "M*-*-"),
])  # fmt: skip
def test_patterns(layers: int, every: int, moe: bool, pattern: str):
    assert pattern_for(layers, None, mamba_every=every, moe=moe) == pattern


def test_layers_with_experts_are_known_from_the_model(folder: Path):
    assert set(pattern_for(None, folder / "qwen3_moe" / "config.json", mamba_every=1)) == set("M*E")


@pytest.mark.parametrize(
    ("layers", "model", "options", "error", "said"),
    [
        (None, None, {}, ConfigError, "give one of --layers and --model"),
        (2, "llama", {}, ConfigError, "not both"),
        (0, None, {}, ConfigError, "--layers 0: must be at least 1"),
        (2, None, {"mamba_every": -1}, ConfigError, "--mamba-every -1: must be at least 0"),
        (None, "llama", {"moe": True}, ConfigError, "--moe: "),
        (None, "deepseek_v3", {}, ConfigError, "cannot become a hybrid"),
        (
            None,
            "seed_oss",
            {},
            ConfigError,
            "a seed_oss model cannot become a hybrid with Mamba layers: it has dropout on ",
        ),
        (None, "nowhere", {}, ModelError, "nowhere"),
        (None, "nowhere.yaml", {}, ConfigError, "no such file"),
    ],
)
def test_what_has_no_pattern_is_refused(folder: Path, layers, model, options, error, said):
    with pytest.raises(error, match=said):
        pattern_for(layers, model and folder / model, **{"mamba_every": 2} | options)
